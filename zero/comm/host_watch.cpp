#include "zero/comm/host_watch.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/base/descriptor.h"
#include "zero/base/error.h"
#include "zero/base/thread.h"
#include "zero/comm/deadline.h"
#include "zero/comm/frame_link.h"
#include "zero/comm/process.h"
#include "zero/comm/socket.h"
#include "zero/comm/token.h"
#include "zero/comm/watched_store.h"

namespace zero::comm {
namespace {

using std::chrono::milliseconds;
using Kind = Frame::Kind;

constexpr const char* kThreadName = "zero watch";  // top -H and debuggers show it
constexpr size_t kLongestName = 255;
/// The time for which a suspicion waits for a rank that knows better.
constexpr milliseconds kSuspicion{500};
/// The time within which a connection must say whose it is.
constexpr milliseconds kHelloTime{5000};
constexpr milliseconds kConnectTime{10'000};
constexpr milliseconds kRefusedTime{1000};

/// Makes one word of a name, since names go into lists divided by blanks.
std::string one_word(std::string name) {
  for (char& c : name) {
    if (std::isgraph(static_cast<unsigned char>(c)) == 0) c = '_';
  }
  if (name.empty()) name = "unknown";
  return name.substr(0, kLongestName);
}

/// Returns "a", "a and b", or "a, b and c".
std::string in_words(const std::vector<std::string>& names) {
  if (names.size() == 1) return names[0];
  return fmt::format("{} and {}", fmt::join(names.begin(), names.end() - 1, ", "), names.back());
}

/// Returns "rank 3" or "ranks 0-1, 4". `ranks` are in ascending order.
std::string rank_ranges(const std::vector<int>& ranks) {
  std::vector<std::string> parts;
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    parts.push_back(end - i == 1 ? fmt::format("{}", ranks[i])
                                 : fmt::format("{}-{}", ranks[i], ranks[end - 1]));
    i = end;
  }
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(parts, ", "));
}

}  // namespace

// The thread shares it, since `on_trouble`, which runs on that thread, may destroy the watch.
class HostWatch::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(Settings settings, OnTrouble on_trouble, Look look);
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void start();
  void meet(const c10::intrusive_ptr<c10d::Store>& of_job);
  Verdict report(int origin, const std::string& message);
  std::optional<Verdict> verdict() const;
  void leave();
  std::string who(int rank) const;
  /// Returns the same words for the beginning of a sentence.
  std::string who_first(int rank) const { return "R" + who(rank).substr(1); }
  std::string self() const { return who(settings_.rank); }
  int rank() const { return settings_.rank; }
  /// Ends this rank's wait for judges that it has not met.
  std::string give_up(const std::string& why);
  /// Returns true if a judge can hear this rank.
  bool heard_by_a_judge() const { return connected_ || is_judge(); }

 private:
  enum class State : uint8_t { absent, present, left, dead };
  /// This watch's knowledge of a rank.
  struct Contact {
    State state = State::absent;
    int host = 0;
    int64_t pid = 0;
    std::string name{};  ///< its host's
    Clock::time_point heard{};
    bool knows = false;  ///< it knows the verdict
  };
  struct Link {
    FrameLink frames;
    int rank = -1;  ///< -1 before it has said hello
    bool to_judge = false;
    Clock::time_point since = Clock::now();
  };
  /// The place where a judge listens.
  struct Place {
    std::string token, address;
    uint16_t port = 0;
    Contact contact;
  };

  bool judges(int rank) const {
    return std::find(judges_.begin(), judges_.end(), rank) != judges_.end();
  }
  bool is_judge() const { return static_cast<bool>(listener_); }
  Contact& contact(int rank) { return contacts_[static_cast<size_t>(rank)]; }
  const Contact& contact(int rank) const { return contacts_[static_cast<size_t>(rank)]; }
  bool known(int rank) const { return rank >= 0 && rank < settings_.size; }
  void wake() const;

  // Used by the caller's thread, while the watches meet.
  Place place_of(WatchedStore& store, const std::string& key, int judge) const;
  Descriptor connect(const Place& place, int judge) const;
  void check_time(Clock::time_point deadline, const std::function<std::string()>& complaint) const;

  // Used by the watch's thread.
  void run();
  void take_orders();
  void beat();
  void look(Clock::time_point now);
  void forgive(Clock::time_point now);
  void decide(Clock::time_point now);
  bool may_go(Clock::time_point now);
  Clock::time_point next_silence(Clock::time_point now) const;
  void wait_for_words(Clock::time_point until);
  void read_from(Link& link, Clock::time_point now);
  void take_word(Link& link, const Frame& frame, Clock::time_point now);
  bool welcome(Link& link, const Frame& frame) const;
  void accept_links();
  void drop_closed(Clock::time_point now);
  void conclude(Verdict verdict);

  bool silent(int rank, Clock::time_point now, milliseconds limit) const;
  int acting_judge(Clock::time_point now) const;
  std::optional<Verdict> find_trouble(Clock::time_point now) const;
  std::optional<Verdict> find_silence(Clock::time_point now) const;
  std::optional<Verdict> lost_judge(int before, Clock::time_point now) const;
  Verdict improved(Verdict report) const;

  const Settings settings_;
  const OnTrouble on_trouble_;
  const Look look_;
  const Clock::time_point started_ = Clock::now();
  std::vector<int> judges_;
  std::string token_;  ///< must be shown by those that connect to this judge
  uint16_t port_ = 0;
  bool connected_ = false;  ///< to a judge; the caller's thread uses it
  Descriptor listener_;
  Descriptor wake_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Verdict> verdict_;  // guarded by the mutex, as the fields below are
  std::vector<Verdict> reports_;
  std::vector<std::pair<Contact, std::unique_ptr<Link>>> arrived_;
  bool leave_asked_ = false;
  bool gave_up_ = false;
  bool ended_ = false;

  // Only the thread uses these, except for this rank's own contact.
  std::vector<Contact> contacts_;
  std::vector<std::unique_ptr<Link>> links_;
  std::vector<pollfd> polled_;
  std::vector<int> deaths_;       ///< in the order in which they were noticed
  std::vector<Verdict> pending_;  ///< reports that wait for a judge
  int told_ = -1;                 ///< the judge that has the first of them
  bool concluded_ = false;
  bool meeting_ = true;  ///< judges that have not come are still awaited
  bool accepting_ = true;
  std::optional<Clock::time_point> judge_lost_;
  std::optional<Clock::time_point> leaving_;
  std::thread thread_;
};

HostWatch::Impl::Impl(Settings settings, OnTrouble on_trouble, Look look)
    : settings_(std::move(settings)), on_trouble_(std::move(on_trouble)), look_(std::move(look)) {
  const auto& topology = settings_.topology;
  ensure(settings_.size > 1 && settings_.rank >= 0 && settings_.rank < settings_.size,
         "a watch is of a rank among several");
  ensure(settings_.silence >= 4 * settings_.beat, "a few beats may be late");
  judges_ = {0, topology.regular && topology.hosts > 1 ? topology.local_size : 1};
  contacts_.resize(static_cast<size_t>(settings_.size));
  const auto process = Process::self();
  contact(settings_.rank) = {State::present, topology.host, process.pid,
                             one_word(settings_.host.empty() ? process.host : settings_.host),
                             Clock::now()};
  if (std::find(judges_.begin(), judges_.end(), settings_.rank) != judges_.end()) {
    token_ = random_token();
    auto listener = listen_at(settings_.address, 0);
    if (!listener.socket) {
      throw CommError(fmt::format(
          "The watch of this rank cannot listen on '{}': {}. Is that an address of this host?",
          settings_.address, listener.reason));
    }
    listener_ = std::move(listener.socket);
    port_ = own_port(listener_);
  }
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_) {
    throw CommError(fmt::format("Cannot make an event for the watch of rank {}: {}.",
                                settings_.rank, std::strerror(errno)));
  }
}

void HostWatch::Impl::start() {
  thread_ = start_thread<CommError>("the watch over the job's ranks",
                                    [self = shared_from_this()] { self->run(); });
}

void HostWatch::Impl::wake() const {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(wake_.get(), &one, sizeof one);
}

std::string HostWatch::Impl::who(int rank) const {
  const auto& there = contact(rank);
  if (there.pid == 0) return fmt::format("rank {}", rank);
  return fmt::format("rank {} (pid {}, host {})", rank, there.pid, there.name);
}

// --- The meeting ---

void HostWatch::Impl::check_time(Clock::time_point deadline,
                                 const std::function<std::string()>& complaint) const {
  if (const auto known = verdict()) throw CommError(known->message);
  if (Clock::now() >= deadline) throw CommError(complaint());
  std::this_thread::sleep_for(milliseconds(20));
}

HostWatch::Impl::Place HostWatch::Impl::place_of(WatchedStore& store, const std::string& key,
                                                 int judge) const {
  const auto said = store.get_to_str(key);
  std::istringstream words(said);
  Place place;
  auto& there = place.contact;
  words >> place.token >> place.address >> place.port >> there.host >> there.pid >> there.name;
  if (!words || !is_token(place.token) || place.port == 0 || there.host < 0 ||
      there.host >= settings_.topology.hosts || there.pid <= 0 ||
      there.name.size() > kLongestName) {
    throw CommError(
        fmt::format("What the job's store says about the watch of rank {} is not what a rank "
                    "writes ({} bytes). Does another program use the same store?",
                    judge, said.size()));
  }
  return place;
}

Descriptor HostWatch::Impl::connect(const Place& place, int judge) const {
  const auto begin = Clock::now();
  const std::string refused = std::strerror(ECONNREFUSED);
  std::string reason;
  for (;;) {
    if (auto connection = connect_to(place.address, place.port, reason)) return connection;
    // The judge listened before it said so, so if it refuses it has ended since.
    const auto patience = reason == refused ? kRefusedTime : kConnectTime;
    check_time(begin + std::min(settings_.arrival, patience), [&] {
      return fmt::format(
          "Rank {} on host {} cannot reach the watch of rank {} at {}:{}: {}. Does rank {} still "
          "run, and does a firewall let the hosts' ranks connect to each other on any port?",
          settings_.rank, contact(settings_.rank).name, judge, place.address, place.port, reason,
          judge);
    });
  }
}

void HostWatch::Impl::meet(const c10::intrusive_ptr<c10d::Store>& of_job) {
  const auto deadline = [this] {
    return started_ + settings_.arrival +
           (heard_by_a_judge() ? settings_.silence : milliseconds(0));
  };
  WatchedStore store("zero/watch", of_job, [&] {
    if (const auto known = verdict()) throw CommError(known->message);
    if (Clock::now() < deadline() + kLastAnswer) return;
    throw CommError(
        fmt::format("The job's store has not answered rank {} for {}. Does rank 0, or the launcher "
                    "of its host, still run there?",
                    settings_.rank, seconds(settings_.arrival)));
  });
  // A store may serve several groups, one after the other: each has its own generation of keys.
  const auto generation = store.add(fmt::format("generation/{}", settings_.rank), 1);
  const auto key = [&](int judge) { return fmt::format("{}/{}", generation, judge); };
  const auto& self = contact(settings_.rank);
  if (is_judge()) {
    store.set(key(settings_.rank), fmt::format("{} {} {} {} {} {}", token_, settings_.address,
                                               port_, self.host, self.pid, self.name));
  }
  // The judge that is there first hears of this rank, and names the other if that does not come.
  auto awaited = judges_;
  std::erase(awaited, settings_.rank);
  while (!awaited.empty()) {
    const auto open = std::find_if(awaited.begin(), awaited.end(),
                                   [&](int judge) { return store.check({key(judge)}); });
    if (open == awaited.end()) {
      check_time(deadline(), [&] {
        return fmt::format("Rank {} waited {} for {} to open a watch. Does it still run?",
                           settings_.rank, seconds(settings_.arrival), rank_ranges(awaited));
      });
      continue;
    }
    const int judge = *open;
    awaited.erase(open);
    auto place = place_of(store, key(judge), judge);
    auto link = std::make_unique<Link>(Link{FrameLink(connect(place, judge)), judge, true});
    link->frames.send(Kind::hello, settings_.rank,
                      fmt::format("{} {} {} {}", place.token, self.host, self.pid, self.name));
    connected_ = true;
    const std::lock_guard lock(mutex_);
    arrived_.emplace_back(std::move(place.contact), std::move(link));
    wake();
  }
}

// --- What other threads ask for ---

Verdict HostWatch::Impl::report(int origin, const std::string& message) {
  if (!known(origin)) origin = settings_.rank;  // shared memory said it
  std::unique_lock lock(mutex_);
  const auto answered = [&] { return verdict_ || ended_; };
  if (origin != settings_.rank) changed_.wait_for(lock, kSuspicion, answered);
  if (!answered()) {
    reports_.push_back({origin, message});
    wake();
    // A judge that does not answer is given up after `silence`, and there are two judges.
    changed_.wait_for(lock, 3 * settings_.silence, answered);
  }
  return verdict_.value_or(Verdict{origin, message});
}

std::optional<Verdict> HostWatch::Impl::verdict() const {
  const std::lock_guard lock(mutex_);
  return verdict_;
}

std::string HostWatch::Impl::give_up(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    gave_up_ = true;
  }
  return heard_by_a_judge() ? report(settings_.rank, why).message : why;
}

void HostWatch::Impl::leave() {
  {
    const std::lock_guard lock(mutex_);
    leave_asked_ = true;
  }
  wake();
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();  // the thread ends by itself when it comes back
  } else if (thread_.joinable()) {
    thread_.join();
  }
}

// --- The thread ---

void HostWatch::Impl::run() {
  pthread_setname_np(pthread_self(), kThreadName);
  auto last = Clock::now();
  auto next_look = last;
  bool beats = true;  // at every other look
  for (;;) {
    take_orders();
    const auto now = Clock::now();
    // This process was stopped, and so missed the others' words.
    if (now - last > settings_.silence / 2) forgive(now);
    last = now;
    if (now >= next_look) {
      look(now);
      if (beats) beat();
      beats = !beats;
      next_look = now + settings_.beat / 2;
    }
    decide(now);
    if (leaving_ && may_go(now)) break;
    wait_for_words(std::min(next_look, next_silence(now)));
  }
  for (auto& link : links_) link->frames.close();
  links_.clear();
  listener_.close();
  const std::lock_guard lock(mutex_);
  ended_ = true;
  changed_.notify_all();
}

void HostWatch::Impl::take_orders() {
  const std::lock_guard lock(mutex_);
  for (auto& [there, link] : arrived_) {
    const auto rank = link->rank;
    const auto state = contact(rank).state;
    contact(rank) = std::move(there);
    contact(rank).state = state == State::absent ? State::present : state;
    contact(rank).heard = Clock::now();
    links_.push_back(std::move(link));
  }
  arrived_.clear();
  for (auto& report : reports_) pending_.push_back(std::move(report));
  reports_.clear();
  meeting_ = !gave_up_;
  if (leave_asked_ && !leaving_) leaving_ = Clock::now();
}

void HostWatch::Impl::beat() {
  for (auto& link : links_) {
    if (link->rank >= 0) link->frames.send(Kind::beat, settings_.rank);
  }
}

void HostWatch::Impl::look(Clock::time_point now) {
  accepting_ = true;
  for (auto& link : links_) read_from(*link, now);
  if (concluded_ || leaving_ || !look_) return;
  if (auto seen = look_(); seen && known(seen->origin)) pending_.push_back(std::move(*seen));
}

void HostWatch::Impl::forgive(Clock::time_point now) {
  for (auto& there : contacts_) there.heard = now;
}

bool HostWatch::Impl::silent(int rank, Clock::time_point now, milliseconds limit) const {
  return rank != settings_.rank && contact(rank).state == State::present &&
         now - contact(rank).heard >= limit;
}

/// Returns the first judge that is not gone, or -1 if all are gone.
int HostWatch::Impl::acting_judge(Clock::time_point now) const {
  for (const int judge : judges_) {
    if (judge == settings_.rank) return judge;
    const auto state = contact(judge).state;
    const bool awaited = meeting_ && state == State::absent && now - started_ < settings_.arrival;
    if (awaited || (state == State::present && !silent(judge, now, settings_.silence))) {
      return judge;
    }
  }
  return -1;
}

void HostWatch::Impl::decide(Clock::time_point now) {
  if (concluded_) return;
  for (int r = 0; r < settings_.size; ++r) {
    if (!silent(r, now, settings_.silence)) continue;
    for (auto& link : links_) read_from(*link, now);  // words may have gathered unread
    if (concluded_) return;
    break;
  }
  const int acting = acting_judge(now);
  if (acting == settings_.rank) {
    if (auto trouble = find_trouble(now)) conclude(std::move(*trouble));
    return;
  }
  auto lost = lost_judge(acting, now);
  if (acting < 0) {
    if (!pending_.empty()) return conclude(pending_.front());
    if (lost) conclude(std::move(*lost));
    return;
  }
  // The next judge sees for itself that the first is gone, unless only this rank has lost it.
  if (!lost) {
    judge_lost_.reset();
  } else if (!judge_lost_) {
    judge_lost_ = now;
  } else if (now - *judge_lost_ > 2 * kSuspicion && pending_.empty()) {
    pending_.push_back(std::move(*lost));
  }
  if (pending_.empty() || told_ == acting) return;
  const auto tell = [&](int judge) {
    const auto link = std::find_if(links_.begin(), links_.end(), [&](const auto& one) {
      return one->to_judge && one->rank == judge;
    });
    if (link == links_.end()) return false;
    (*link)->frames.send(Kind::report, pending_.front().origin, pending_.front().message);
    told_ = acting;
    return true;
  };
  if (tell(acting) || meeting_) return;
  // This rank could not connect to the acting judge, so it tells any judge that it reaches.
  if (is_judge()) return conclude(pending_.front());
  for (const int judge : judges_) {
    if (tell(judge)) return;
  }
}

std::optional<Verdict> HostWatch::Impl::find_trouble(Clock::time_point now) const {
  if (!deaths_.empty()) {
    return Verdict{deaths_.front(), fmt::format("{} died.", who_first(deaths_.front()))};
  }
  if (!pending_.empty()) return improved(pending_.front());
  if (auto silence = find_silence(now)) return silence;
  if (now - started_ < settings_.arrival) return std::nullopt;
  std::vector<int> absent;
  for (int r = 0; r < settings_.size; ++r) {
    if (contact(r).state == State::absent) absent.push_back(r);
  }
  if (absent.empty()) return std::nullopt;
  return Verdict{absent.front(), fmt::format("Within {} of the start nothing was heard of {}.",
                                             seconds(settings_.arrival), rank_ranges(absent))};
}

std::optional<Verdict> HostWatch::Impl::find_silence(Clock::time_point now) const {
  int first = 0;
  while (first < settings_.size && !silent(first, now, settings_.silence)) ++first;
  if (first == settings_.size) return std::nullopt;
  // Ranks that stopped together were not last heard at quite the same moment.
  const auto nearly = settings_.silence - 3 * settings_.beat / 2;
  const auto wholly_silent = [&](int host) {
    for (int r = 0; r < settings_.size; ++r) {
      const auto& there = contact(r);
      if (there.host == host && there.state == State::present && !silent(r, now, nearly))
        return false;
    }
    return true;
  };
  if (!wholly_silent(contact(first).host)) {
    return Verdict{first, fmt::format("{} has been silent for {}.", who_first(first),
                                      seconds(settings_.silence))};
  }
  std::vector<int> ranks, hosts;
  std::vector<std::string> names;
  bool heard_others = false;
  for (int r = 0; r < settings_.size; ++r) {
    const auto& there = contact(r);
    if (there.state != State::present || there.host == settings_.topology.host) continue;
    if (!wholly_silent(there.host)) {
      heard_others = true;
      continue;
    }
    ranks.push_back(r);
    if (std::find(hosts.begin(), hosts.end(), there.host) != hosts.end()) continue;
    hosts.push_back(there.host);
    names.push_back(there.name);
  }
  const bool several = hosts.size() > 1;
  auto message =
      fmt::format("{} {} {} been silent for {}: {}.", several ? "Hosts" : "Host", in_words(names),
                  several ? "have" : "has", seconds(settings_.silence), rank_ranges(ranks));
  if (several && !heard_others) {
    message += fmt::format(" Those are all the others: is the link of host {} cut?",
                           contact(settings_.rank).name);
  }
  return Verdict{ranks.front(), std::move(message)};
}

/// Returns this rank's report if a judge before the judge `before` is gone without having left.
std::optional<Verdict> HostWatch::Impl::lost_judge(int before, Clock::time_point now) const {
  std::optional<int> first;
  std::vector<std::string> silent_hosts;
  for (const int judge : judges_) {
    if (judge == before) break;
    const auto& there = contact(judge);
    const bool is_silent = silent(judge, now, settings_.silence);
    if (there.state != State::dead && !is_silent) continue;
    if (!first) first = judge;
    if (is_silent && there.host != settings_.topology.host) silent_hosts.push_back(there.name);
  }
  if (!first) return std::nullopt;
  if (silent_hosts.size() == judges_.size()) {
    return Verdict{*first,
                   fmt::format("Host {} has heard nothing from hosts {} for {}: is its link cut?",
                               contact(settings_.rank).name, in_words(silent_hosts),
                               seconds(settings_.silence))};
  }
  const auto what = contact(*first).state == State::dead
                        ? "died"
                        : fmt::format("has been silent for {}", seconds(settings_.silence));
  return Verdict{*first, fmt::format("{} {}.", who_first(*first), what)};
}

/// Adds to a report what the judge knows about the rank that it blames.
Verdict HostWatch::Impl::improved(Verdict report) const {
  if (report.origin != settings_.rank && contact(report.origin).state == State::left) {
    report.message = fmt::format("{} left the job while others went on. {}",
                                 who_first(report.origin), report.message);
  }
  return report;
}

void HostWatch::Impl::conclude(Verdict verdict) {
  verdict.message = verdict.message.substr(0, FrameLink::kLongestText);
  concluded_ = true;
  const auto tell = [&](bool to_judges) {
    for (auto& link : links_) {
      if (link->rank >= 0 && is_judge() && judges(link->rank) == to_judges) {
        link->frames.send(Kind::verdict, verdict.origin, verdict.message);
      }
    }
  };
  tell(true);  // the other judge goes on with it if this process dies now
  tell(false);
  {
    const std::lock_guard lock(mutex_);
    verdict_ = verdict;
    changed_.notify_all();
  }
  if (on_trouble_) on_trouble_(verdict);
}

/// Returns true if nobody needs this watch any more.
bool HostWatch::Impl::may_go(Clock::time_point now) {
  const auto waited = now - *leaving_;
  const auto rank_order = [&](int rank) {
    return std::find(judges_.begin(), judges_.end(), rank) - judges_.begin();
  };
  const bool awaited = std::any_of(links_.begin(), links_.end(), [&](const auto& link) {
    if (link->frames.has_unsent()) return true;
    if (!is_judge() || link->rank < 0) return false;
    const auto& there = contact(link->rank);
    if (there.state != State::present || now - there.heard >= settings_.silence / 2) return false;
    // Judges go in the reverse order of their places: each waits for those behind it.
    return concluded_ ? !there.knows : rank_order(link->rank) > rank_order(settings_.rank);
  });
  // A rank that is still on its way would find nobody to tell it the cause.
  const bool all_came = !concluded_ || !is_judge() ||
                        std::none_of(contacts_.begin(), contacts_.end(),
                                     [](auto& there) { return there.state == State::absent; });
  if ((awaited || !all_came) && waited < settings_.linger) return false;
  if (!concluded_) {
    for (auto& link : links_) link->frames.send(Kind::leave, settings_.rank);
  }
  return true;
}

/// Returns when a silence may be noticed next, or anything else that no word announces.
Clock::time_point HostWatch::Impl::next_silence(Clock::time_point now) const {
  if (leaving_) return now + milliseconds(20);
  auto next = now + settings_.beat;
  for (const auto& there : contacts_) {
    const auto end = there.heard + settings_.silence;
    if (there.state == State::present && end > now) next = std::min(next, end);
  }
  return next;
}

void HostWatch::Impl::wait_for_words(Clock::time_point until) {
  auto& polled = polled_;
  polled.assign({{wake_.get(), POLLIN, 0}, {accepting_ ? listener_.get() : -1, POLLIN, 0}});
  for (const auto& link : links_) {
    polled.push_back({link->frames.socket(),
                      static_cast<short>(POLLIN | (link->frames.has_unsent() ? POLLOUT : 0)), 0});
  }
  const auto pause = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
  if (poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(pause, 0))) <= 0) {
    drop_closed(Clock::now());
    return;
  }
  if (polled[0].revents != 0) {
    uint64_t count = 0;
    [[maybe_unused]] const auto got = read(wake_.get(), &count, sizeof count);
  }
  const auto now = Clock::now();
  for (size_t i = 0; i < links_.size(); ++i) {
    auto& link = *links_[i];
    const auto events = polled[i + 2].revents;
    if ((events & POLLOUT) != 0) link.frames.flush();
    if ((events & ~POLLOUT) != 0) read_from(link, now);
  }
  if (polled[1].revents != 0) accept_links();
  drop_closed(now);
}

void HostWatch::Impl::read_from(Link& link, Clock::time_point now) {
  for (const auto& frame : link.frames.receive()) {
    take_word(link, frame, now);
    if (link.frames.socket() < 0) return;
  }
}

void HostWatch::Impl::take_word(Link& link, const Frame& frame, Clock::time_point now) {
  if (link.rank < 0) {
    if (!welcome(link, frame)) return link.frames.close();
    link.rank = frame.origin;
    std::istringstream words(frame.text);
    std::string token;
    Contact there{State::present};
    words >> token >> there.host >> there.pid >> there.name;
    if (contact(link.rank).state == State::absent) contact(link.rank) = std::move(there);
    contact(link.rank).heard = now;
    const std::lock_guard lock(mutex_);
    if (verdict_) link.frames.send(Kind::verdict, verdict_->origin, verdict_->message);
    return;
  }
  auto& there = contact(link.rank);
  there.heard = now;
  if (!known(frame.origin)) return link.frames.close();
  switch (frame.kind) {
    case Kind::hello:
      return link.frames.close();
    case Kind::beat:
      return;
    case Kind::report:
      if (!link.to_judge && !concluded_) pending_.push_back({frame.origin, frame.text});
      return;
    case Kind::verdict:
      if (!judges(link.rank)) return;
      there.knows = true;
      link.frames.send(Kind::heard, settings_.rank);
      if (!concluded_) conclude({frame.origin, frame.text});
      return;
    case Kind::heard:
      there.knows = true;
      return;
    case Kind::leave:
      if (there.state == State::present) there.state = State::left;
      return;
  }
}

/// Returns true for the hello of a rank of this job that has not come yet.
bool HostWatch::Impl::welcome(Link& link, const Frame& frame) const {
  if (frame.kind != Kind::hello || !known(frame.origin) || frame.origin == settings_.rank) {
    return false;
  }
  std::istringstream words(frame.text);
  std::string token, name;
  int host = -1;
  int64_t pid = 0;
  words >> token >> host >> pid >> name;
  const bool first = std::none_of(links_.begin(), links_.end(), [&](const auto& other) {
    return other.get() != &link && other->rank == frame.origin && !other->to_judge;
  });
  return words && token == token_ && host >= 0 && host < settings_.topology.hosts && pid > 0 &&
         pid <= std::numeric_limits<pid_t>::max() && name.size() <= kLongestName &&
         one_word(name) == name && first;
}

void HostWatch::Impl::accept_links() {
  for (;;) {
    Descriptor connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection) {
      // The process may have no descriptor left; the watch tries again at the next beat.
      if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) accepting_ = false;
      return;
    }
    const auto strangers = std::count_if(links_.begin(), links_.end(),
                                         [](const auto& link) { return link->rank < 0; });
    if (strangers >= settings_.size + 64) continue;
    links_.push_back(std::make_unique<Link>(Link{FrameLink(std::move(connection))}));
    links_.back()->frames.let_beats_gather();
  }
}

void HostWatch::Impl::drop_closed(Clock::time_point now) {
  std::erase_if(links_, [&](const auto& link) {
    if (link->rank < 0 && now - link->since > kHelloTime) return true;
    if (!link->frames.closed()) return false;
    if (link->rank >= 0 && contact(link->rank).state == State::present) {
      contact(link->rank).state = State::dead;
      deaths_.push_back(link->rank);
    }
    return true;
  });
}

// --- The front ---

HostWatch::HostWatch(Settings settings, c10d::Store& store, OnTrouble on_trouble, Look look)
    : exceptions_(std::uncaught_exceptions()) {
  const int rank = settings.rank;
  impl_ = std::make_shared<Impl>(std::move(settings), std::move(on_trouble), std::move(look));
  impl_->start();
  std::string failure;
  try {
    impl_->meet(c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store));
    return;
  } catch (const c10::Error& error) {
    failure = fmt::format("Rank {} lost the job's store while the watches met: {}.", rank,
                          first_line(error));
  } catch (const std::exception& error) {
    failure = error.what();
  }
  failure = impl_->give_up(failure);
  impl_->leave();
  throw CommError(failure);
}

HostWatch::~HostWatch() {
  if (!owner_.here()) {
    // The thread and the connections belong to the parent.
    static_cast<void>(new std::shared_ptr<Impl>(std::move(impl_)));
    return;
  }
  if (std::uncaught_exceptions() > exceptions_) {
    impl_->report(impl_->rank(),
                  fmt::format("{} left because of an exception.", impl_->who_first(impl_->rank())));
  }
  impl_->leave();
}

Verdict HostWatch::report(int origin, const std::string& message) {
  return impl_->report(origin, message);
}

std::optional<Verdict> HostWatch::verdict() const { return impl_->verdict(); }

void HostWatch::leave() { impl_->leave(); }

std::string HostWatch::self() const { return impl_->self(); }

}  // namespace zero::comm
