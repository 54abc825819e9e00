// Rails over MPI. libzero_rail_openmpi.so and libzero_rail_mpich.so are this file, each linked to
// one MPI.
//
// Note [MPI from one thread]
// MPI moves bytes only while somebody calls it. So a thread of the plugin's own posts the ranks'
// operations and tests them every 50 us while anything is under way. Computing threads need not
// help, and only this thread calls MPI, which every MPI allows. It sleeps between two tests, since
// a thread inside MPI_Wait would take a core.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#include <sys/prctl.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/rail_plugin.h"

namespace {

constexpr std::chrono::microseconds kInterval{50};

// Throws MPI's message for a status that is not success.
void check(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING] = "";
  int size = 0;
  MPI_Error_string(status, text, &size);
  throw std::runtime_error(std::string(call) + ": " + text);
}

struct Line {
  std::vector<MPI_Comm> channels{};
  int tag_bits = 0;
};

// One send or receive, from its post to its release. The world's mutex guards `state`.
struct Operation {
  enum class State { under_way, over, failed };
  Line* line = nullptr;
  bool sends = false;
  int peer = 0, channel = 0, tag = 0;
  void* bytes = nullptr;
  int size = 0;
  State state = State::under_way;
  bool aborted = false;
  std::string error{};
  std::condition_variable changed{};
};

// The process's part in MPI. There is one such object, since MPI knows the process once.
class World {
  static constexpr const char* kStopped = "the rails over MPI have been aborted in this process";
  struct Task {
    const std::function<void()>& body;
    std::promise<void> ended;
  };

 public:
  // It is never destroyed: if MPI's thread is stuck it goes on until the process has ended.
  static World& instance() {
    static World& world = *new World;
    static const Leaving at_exit(world);
    return world;
  }

  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // Runs `body` on MPI's thread and returns when it has ended; rethrows its error.
  void run(const std::function<void()>& body) {
    Task task{body, {}};
    auto ended = task.ended.get_future();
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) throw std::runtime_error(kStopped);
      tasks_.push_back(&task);
    }
    wake_.notify_all();
    ended.get();
  }

  Operation* post(std::unique_ptr<Operation> operation) {
    {
      const std::lock_guard lock(mutex_);
      if (stopped_) throw std::runtime_error(kStopped);
      posted_.push_back(operation.get());
    }
    wake_.notify_all();
    return operation.release();
  }

  int wait(Operation& operation, std::chrono::milliseconds timeout, std::string& error) {
    std::unique_lock lock(mutex_);
    using State = Operation::State;
    const bool ended = operation.changed.wait_for(lock, timeout, [&] {
      return operation.state != State::under_way || operation.aborted || stopped_;
    });
    if (operation.state == State::over) return 1;
    if (operation.state == State::failed || !ended) {
      error = ended ? operation.error : "nothing moved until the time was up";
      return -1;
    }
    return 0;
  }

  void abort(Operation& operation) {
    const std::lock_guard lock(mutex_);
    operation.aborted = true;
    operation.changed.notify_all();
  }

  void release(Operation* operation) {
    std::unique_ptr<Operation> owned(operation);
    bool under_way = false;
    {
      const std::lock_guard lock(mutex_);
      under_way = owned->state == Operation::State::under_way;
    }
    // If MPI's thread is stuck it still has the operation, whose memory must stay.
    if (under_way && !stop()) (void)owned.release();
  }

  // Returns true if MPI touches no memory of a rail any more, since nobody calls it. Returns false
  // while a rail is being opened, which may wait for ever for a rank that has died; until the
  // process ends MPI may then still fill the memory of receives that were under way.
  bool stop() {
    std::unique_lock lock(mutex_);
    stopped_ = true;
    wake_.notify_all();
    quiet_.wait(lock, [this] { return ended_ || runs_task_; });
    return ended_;
  }

  // Runs on MPI's thread. Makes MPI ready, or throws.
  void initialise() {
    int done = 0, over = 0;
    MPI_Finalized(&over);
    if (over != 0) throw std::runtime_error("MPI has been finalised in this process");
    MPI_Initialized(&done);
    int level = 0;
    if (done != 0) {
      MPI_Query_thread(&level);
      if (!initialised_ && level < MPI_THREAD_MULTIPLE) {
        throw std::runtime_error(
            "the program has initialised MPI without MPI_THREAD_MULTIPLE: initialise it so, or "
            "leave it to libzero");
      }
      return;
    }
    check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level), "MPI_Init_thread");
    if (level < MPI_THREAD_FUNNELED) throw std::runtime_error("this MPI allows no threads");
    initialised_ = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }

 private:
  World() : thread_([this] { work(); }) {}

  class Leaving {
   public:
    explicit Leaving(World& world) : world_(world) {}
    Leaving(const Leaving&) = delete;
    Leaving& operator=(const Leaving&) = delete;
    ~Leaving() { world_.leave(); }

   private:
    World& world_;
  };

  void leave() {
    {
      const std::lock_guard lock(mutex_);
      leaves_ = true;
      // the task's caller has given up, and MPI waits for a rank that has died
      if (runs_task_) return;
    }
    wake_.notify_all();
    thread_.join();
  }

  void work() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // otherwise 50 us would be 100
    std::unique_lock lock(mutex_);
    while (!stopped_ && !(leaves_ && idle())) {
      if (idle()) {
        wake_.wait(lock, [this] { return stopped_ || leaves_ || !idle(); });
        continue;
      }
      Task* task = nullptr;
      if (!tasks_.empty()) {
        task = tasks_.front();
        tasks_.pop_front();
      }
      auto posted = std::exchange(posted_, {});
      runs_task_ = task != nullptr;
      lock.unlock();
      if (task != nullptr) {
        run_here(*task);
        lock.lock();
        if (stopped_) {  // it was stopped meanwhile, and the posted memory may be gone
          posted_.insert(posted_.end(), posted.begin(), posted.end());
          break;
        }
        lock.unlock();
      }
      std::vector<Operation*> ended;
      for (auto* operation : posted) start(*operation, ended);
      test(ended);
      lock.lock();
      for (auto* operation : ended) {
        operation->state =
            operation->error.empty() ? Operation::State::over : Operation::State::failed;
        operation->changed.notify_all();
      }
      if (ended.empty() && !stopped_ && tasks_.empty() && posted_.empty() && !under_way_.empty())
        wake_.wait_for(lock, kInterval);
    }
    if (!stopped_ && initialised_) {
      lock.unlock();
      MPI_Finalize();
      lock.lock();
    }
    stopped_ = true;
    ended_ = true;
    for (auto* operation : under_way_) operation->changed.notify_all();
    for (auto* operation : posted_) operation->changed.notify_all();
    for (auto* task : tasks_)
      task->ended.set_exception(std::make_exception_ptr(std::runtime_error(kStopped)));
    quiet_.notify_all();
  }

  void run_here(Task& task) {
    std::exception_ptr error;
    try {
      task.body();
    } catch (...) {
      error = std::current_exception();
    }
    {
      // It is cleared first, since the caller may leave at once, and MPI is not stuck.
      const std::lock_guard lock(mutex_);
      runs_task_ = false;
    }
    if (error) {
      task.ended.set_exception(error);
    } else {
      task.ended.set_value();
    }
  }

  bool idle() const { return tasks_.empty() && posted_.empty() && under_way_.empty(); }

  void start(Operation& operation, std::vector<Operation*>& ended) {
    MPI_Request request = MPI_REQUEST_NULL;
    const auto channel = operation.line->channels[static_cast<size_t>(operation.channel)];
    try {
      if (operation.sends) {
        check(MPI_Isend(operation.bytes, operation.size, MPI_BYTE, operation.peer, operation.tag,
                        channel, &request),
              "MPI_Isend");
      } else {
        check(MPI_Irecv(operation.bytes, operation.size, MPI_BYTE, operation.peer, operation.tag,
                        channel, &request),
              "MPI_Irecv");
      }
    } catch (const std::exception& error) {
      operation.error = error.what();
      ended.push_back(&operation);
      return;
    }
    requests_.push_back(request);
    under_way_.push_back(&operation);
  }

  // Adds the operations that are over to `ended`.
  void test(std::vector<Operation*>& ended) {
    if (requests_.empty()) return;
    const int all = static_cast<int>(requests_.size());
    int count = 0;
    indices_.resize(requests_.size());
    statuses_.resize(requests_.size());
    const int status =
        MPI_Testsome(all, requests_.data(), &count, indices_.data(), statuses_.data());
    if (count == MPI_UNDEFINED || count == 0) return;
    for (int i = 0; i < count; ++i) {
      auto* operation = under_way_[static_cast<size_t>(indices_[static_cast<size_t>(i)])];
      const int own = statuses_[static_cast<size_t>(i)].MPI_ERROR;
      if (status == MPI_ERR_IN_STATUS && own != MPI_SUCCESS) {
        char text[MPI_MAX_ERROR_STRING] = "";
        int size = 0;
        MPI_Error_string(own, text, &size);
        operation->error = text;
      }
      ended.push_back(operation);
    }
    // MPI has set the requests that are over to null.
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      requests_[kept] = requests_[i];
      under_way_[kept++] = under_way_[i];
    }
    requests_.resize(kept);
    under_way_.resize(kept);
  }

  std::mutex mutex_;
  std::condition_variable wake_, quiet_;
  std::deque<Task*> tasks_;
  std::deque<Operation*> posted_;
  bool stopped_ = false, leaves_ = false, ended_ = false, runs_task_ = false;
  // Only MPI's thread uses these members until it has ended.
  bool initialised_ = false;
  std::vector<MPI_Request> requests_;
  std::vector<Operation*> under_way_;  // by request
  std::vector<int> indices_;
  std::vector<MPI_Status> statuses_;
  std::thread thread_;  // last, since it uses all members above
};

// Checks that this process and the others have the numbers in MPI that libzero takes them to have.
void check_places(const std::vector<int>& ranks, int host) {
  int processes = 0, own = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &processes);
  MPI_Comm_rank(MPI_COMM_WORLD, &own);
  const int expected = ranks[static_cast<size_t>(host)];
  if (own == expected && *std::max_element(ranks.begin(), ranks.end()) < processes) return;
  throw std::runtime_error("MPI has " + std::to_string(processes) +
                           " processes, and this one, rank " + std::to_string(expected) +
                           " of the job, is number " + std::to_string(own) +
                           " of them. Start the ranks with this MPI's mpirun, or srun --mpi=TYPE");
}

std::unique_ptr<Line> open_line(const std::vector<int>& ranks, int host, int channels) {
  auto line = std::make_unique<Line>();
  line->channels.resize(static_cast<size_t>(channels), MPI_COMM_NULL);
  World::instance().run([&] {
    World::instance().initialise();
    check_places(ranks, host);
    MPI_Group all = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
    check(MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
    check(MPI_Group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &members),
          "MPI_Group_incl");
    MPI_Comm joined = MPI_COMM_NULL;
    constexpr int kTag = 0;  // one thread makes one after the other
    check(MPI_Comm_create_group(MPI_COMM_WORLD, members, kTag, &joined), "MPI_Comm_create_group");
    MPI_Group_free(&members);
    MPI_Group_free(&all);
    MPI_Comm_set_errhandler(joined, MPI_ERRORS_RETURN);
    for (auto& channel : line->channels) {
      check(MPI_Comm_dup(joined, &channel), "MPI_Comm_dup");
      MPI_Comm_set_errhandler(channel, MPI_ERRORS_RETURN);
    }
    MPI_Comm_free(&joined);
    int* most = nullptr;
    int known = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &known);
    const unsigned tags = known != 0 && most != nullptr ? static_cast<unsigned>(*most) : 32767U;
    line->tag_bits = static_cast<int>(std::bit_width(tags + 1) - 1);
  });
  return line;
}

void tell(const std::string& text, char* error, size_t size) {
  if (size > 0) std::snprintf(error, size, "%s", text.c_str());
}

// Returns the result of `body`; if it throws, returns `otherwise` and writes the message to
// `error`.
template <class Result, class Body>
Result guarded(Result otherwise, char* error, size_t size, const Body& body) {
  try {
    return body();
  } catch (const std::exception& thrown) {
    tell(thrown.what(), error, size);
    return otherwise;
  }
}

void* open(const int32_t* ranks, int32_t host, int32_t hosts, int32_t channels, char* error,
           size_t size) {
  return guarded<void*>(nullptr, error, size, [&] {
    return open_line({ranks, ranks + hosts}, host, channels).release();
  });
}

int32_t tag_bits(void* rail) { return static_cast<Line*>(rail)->tag_bits; }

void* post(void* rail, int32_t sends, int32_t peer, int32_t channel, int32_t tag, void* bytes,
           size_t size, char* error, size_t error_size) {
  return guarded<void*>(nullptr, error, error_size, [&] {
    auto operation = std::make_unique<Operation>();
    operation->line = static_cast<Line*>(rail);
    operation->sends = sends != 0;
    operation->peer = peer;
    operation->channel = channel;
    operation->tag = tag;
    operation->bytes = bytes;
    operation->size = static_cast<int>(size);
    return World::instance().post(std::move(operation));
  });
}

int32_t wait(void* piece, int64_t milliseconds, char* error, size_t size) {
  std::string why;
  const auto outcome = World::instance().wait(*static_cast<Operation*>(piece),
                                              std::chrono::milliseconds(milliseconds), why);
  if (outcome < 0) tell(why, error, size);
  return outcome;
}

void abort_piece(void* piece) { World::instance().abort(*static_cast<Operation*>(piece)); }
void release(void* piece) { World::instance().release(static_cast<Operation*>(piece)); }
void stop(void* /*rail*/) { (void)World::instance().stop(); }

void close(void* rail) {
  std::unique_ptr<Line> line(static_cast<Line*>(rail));
  try {
    World::instance().run([&line] {
      for (auto& channel : line->channels) MPI_Comm_free(&channel);
    });
    // MPI was stopped, and nobody calls it any more unless it is stuck
  } catch (const std::exception&) {
    if (!World::instance().stop()) (void)line.release();
  }
}

const char* library() {
  static const std::string name = [] {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int size = 0;
    MPI_Get_library_version(text, &size);
    std::string whole(text);
    // The text is, for example, "Open MPI v4.1.4, package: ..." or "MPICH Version:\t4.0.2
    // MPICH Release date: ...".
    whole.erase(std::min({whole.find(','), whole.find('\n'), whole.size()}));
    std::replace(whole.begin(), whole.end(), '\t', ' ');
    return whole;
  }();
  return name.c_str();
}

}  // namespace

extern "C" const ZeroRailPlugin* zero_rail_plugin(void) {
  static const ZeroRailPlugin plugin{ZERO_RAIL_PLUGIN_INTERFACE,
                                     library(),
                                     open,
                                     tag_bits,
                                     post,
                                     wait,
                                     abort_piece,
                                     release,
                                     stop,
                                     close};
  return &plugin;
}
