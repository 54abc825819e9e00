#include "zero/paging/simulation.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <utility>

#include "zero/base/error.h"

namespace zero::paging {

namespace {

constexpr size_t kNone = SimulatedTask::kNone;

size_t index(Resource resource) { return static_cast<size_t>(resource); }

double seconds_of(double amount, double speed) { return speed > 0 ? amount / speed : 0; }

// Holds the tasks in the order in which they are handed out. Each resource does its tasks in that
// order.
class Machine {
 public:
  explicit Machine(const Speeds& speeds) : speeds_(speeds) { last_.fill(kNone); }

  // Adds a task that begins after the tasks in `needs` (kNone stands for nothing) and after the
  // last task of its resource.
  size_t add(SimulatedTask task, double seconds, std::initializer_list<size_t> needs) {
    const auto wait = [&](size_t other) {
      if (other == kNone || tasks_[other].end < task.begin ||
          (task.waited_for != kNone && tasks_[other].end == task.begin))
        return;
      task.begin = tasks_[other].end;
      task.waited_for = other;
    };
    // If a need ends just when the resource gets free, the task waited for the need.
    for (const size_t need : needs) wait(need);
    const size_t before = last_[index(task.resource)];
    wait(before);
    if (task.resource == Resource::link) carrying_ += seconds * speeds_.link_work;
    if (task.resource == Resource::compute) {
      // While processors have nothing to compute, they carry without loss.
      const double idle = task.begin - (before == kNone ? 0 : tasks_[before].end);
      seconds += std::max(0.0, std::exchange(carrying_, 0) - idle * speeds_.link_work);
    }
    task.end = task.begin + seconds;
    tasks_.push_back(task);
    return last_[index(task.resource)] = tasks_.size() - 1;
  }

  // Adds a task that moves bytes after `need`, and returns it. If there are no bytes, returns
  // `need`.
  size_t move(Resource resource, Work work, int64_t unit, int64_t bytes, size_t need,
              size_t also = kNone) {
    if (bytes == 0) return later(need, also);
    const double speed = resource == Resource::link   ? speeds_.link
                         : resource == Resource::disk ? speeds_.disk
                                                      : speeds_.pcie;
    return add({.resource = resource, .work = work, .unit = unit, .bytes = bytes},
               seconds_of(static_cast<double>(bytes), speed), {need, also});
  }

  // Returns the task that ends later.
  size_t later(size_t a, size_t b) const {
    if (a == kNone || b == kNone) return a == kNone ? b : a;
    return tasks_[a].end >= tasks_[b].end ? a : b;
  }

  const Speeds& speeds() const { return speeds_; }
  std::vector<SimulatedTask> take() { return std::move(tasks_); }

 private:
  Speeds speeds_;
  std::vector<SimulatedTask> tasks_;
  std::array<size_t, kResources> last_{};
  double carrying_ = 0;  // seconds that processors still need for messages
};

class Run {
 public:
  Run(const StepSchedule& schedule, const Speeds& speeds)
      : schedule_(schedule),
        plan_(schedule.plan()),
        machine_(speeds),
        arrived_(schedule.units.size(), kNone),
        reduced_(schedule.units.size(), 0),
        gathered_(schedule.units.size(), 0),
        read_(plan_.gathers.size(), kNone) {}

  SimulatedStep finish() {
    if (schedule_.updates_in == UpdatesIn::next_step) {  // those of the step before
      for (int64_t u = 0; u < static_cast<int64_t>(schedule_.units.size()); ++u)
        begin_update_beside(u, kNone);
      end_update_beside();
    }
    passes();
    if (schedule_.updates_in == UpdatesIn::step) {
      updates();
    } else {
      put_into_force();
    }
    SimulatedStep step{.tasks = machine_.take()};
    for (const auto& task : step.tasks) {
      step.seconds = std::max(step.seconds, task.end);
      step.busy[index(task.resource)] += task.end - task.begin;
      step.bytes[index(task.resource)] += task.bytes;
    }
    expose(step);
    step.live_bytes = live_bytes();
    return step;
  }

 private:
  const UnitCosts& costs(int64_t unit) const { return schedule_.units[static_cast<size_t>(unit)]; }

  void passes() {
    auto reduction = schedule_.reductions.begin();
    for (size_t p = 0; p < schedule_.trace.operators(); ++p) {
      start_gathers(p);
      size_t units = stalled_;
      for (const int64_t unit : schedule_.trace.units(p))
        units = machine_.later(units, arrived_[static_cast<size_t>(unit)]);
      const auto used = schedule_.trace.units(p);
      computed_ = machine_.add({.resource = Resource::compute,
                                .work = schedule_.backward[p] != 0 ? Work::backward : Work::forward,
                                .unit = used.empty() ? 0 : used.front()},
                               seconds_of(schedule_.flops[p], machine_.speeds().compute), {units});
      for (; reduction != schedule_.reductions.end() && reduction->after == p; ++reduction) {
        if (starts(*reduction)) reduce(reduction->unit);
      }
    }
    ensure(reduction == schedule_.reductions.end(), "reductions are in the order of the operators");
    if (schedule_.reduces_in != ReducesIn::step) return;
    std::vector<uint8_t> done(schedule_.units.size(), 0);
    for (const auto& each : schedule_.reductions) {
      if (std::exchange(done[static_cast<size_t>(each.unit)], 1) == 0) reduce(each.unit);
    }
  }

  bool starts(const StepSchedule::Reduction& reduction) const {
    if (schedule_.reduces_in != ReducesIn::last_pass)
      return schedule_.reduces_in == ReducesIn::every_pass;
    const auto last = std::find_if(schedule_.reductions.rbegin(), schedule_.reductions.rend(),
                                   [&](const auto& each) { return each.unit == reduction.unit; });
    return &*last == &reduction;
  }

  // Starts the gathers that may start before operator `p`.
  void start_gathers(size_t p) {
    for (; next_ < plan_.gathers.size() && plan_.gathers[next_].start <= p; ++next_) {
      const int64_t unit = plan_.gathers[next_].unit;
      const auto& cost = costs(unit);
      if (std::exchange(gathered_[static_cast<size_t>(unit)], 1) == 0 && cost.trainable &&
          cost.updated_in_gather)
        computed_ = update(unit, computed_);
      read_up_to(next_ + 1);
      if (cost.gather_read > 0) ahead_bytes_ -= cost.gather_read;
      const size_t here =
          machine_.move(Resource::up, Work::copy, unit, cost.gather_up, computed_, read_[next_]);
      arrived_[static_cast<size_t>(unit)] =
          machine_.move(Resource::link, Work::gather, unit, cost.gather, here);
    }
    while (next_read_ < plan_.gathers.size()) {
      const int64_t bytes = costs(plan_.gathers[next_read_].unit).gather_read;
      if (ahead_bytes_ > 0 && ahead_bytes_ + bytes > schedule_.read_ahead_bytes) break;
      read_up_to(next_read_ + 1);
    }
  }

  // Reads the slices of the gathers before number `end`.
  void read_up_to(size_t end) {
    for (; next_read_ < end; ++next_read_) {
      const int64_t unit = plan_.gathers[next_read_].unit;
      const int64_t bytes = costs(unit).gather_read;
      ahead_bytes_ += bytes;
      if (bytes > 0)
        read_[next_read_] = machine_.move(Resource::disk, Work::read, unit, bytes, computed_);
    }
  }

  void reduce(int64_t unit) {
    const auto& cost = costs(unit);
    const bool first = std::exchange(reduced_[static_cast<size_t>(unit)], 1) == 0;
    const size_t sum = machine_.move(Resource::link, Work::reduce, unit, cost.reduce, computed_);
    const size_t older = std::exchange(under_way_, sum);
    if (unit_under_way_ >= 0) begin_update_beside(unit_under_way_, kept_under_way_);
    if (schedule_.reduces_in == ReducesIn::every_pass) stalled_ = older;
    size_t kept = machine_.move(Resource::down, Work::copy, unit,
                                first ? cost.reduce_down : cost.reduce_down_next, sum);
    if (!first) kept = machine_.move(Resource::disk, Work::read, unit, cost.reduce_read, kept);
    kept = machine_.move(Resource::disk, Work::write, unit, cost.reduce_write, kept);
    gradients_ = machine_.later(gradients_, kept);
    if (schedule_.updates_in != UpdatesIn::backward) return;
    unit_under_way_ = unit;
    kept_under_way_ = kept;
  }

  // Begins the update of a unit beside other work: its states are read while the unit before it is
  // updated.
  void begin_update_beside(int64_t unit, size_t sum) {
    const auto& cost = costs(unit);
    if (!cost.trainable) return;
    const size_t states = machine_.move(Resource::disk, Work::read, unit, cost.update_read, sum);
    end_update_beside();
    updated_beside_ = unit;
    begun_update_ = machine_.move(Resource::down, Work::copy, unit, cost.update_down, states, sum);
  }
  void end_update_beside() {
    const int64_t unit = std::exchange(updated_beside_, -1);
    if (unit < 0) return;
    const auto& cost = costs(unit);
    updated_ = machine_.add(
        {.resource = Resource::host, .work = Work::update, .unit = unit, .bytes = cost.update},
        seconds_of(static_cast<double>(cost.update), machine_.speeds().update),
        {begun_update_, updated_});
    machine_.move(Resource::disk, Work::write, unit, cost.update_write, updated_);
  }

  // The new parameters of updates beside other work come into force when the passes have ended.
  void put_into_force() {
    if (unit_under_way_ >= 0) begin_update_beside(unit_under_way_, kept_under_way_);
    end_update_beside();
    const size_t ended = machine_.later(machine_.later(computed_, gradients_), updated_);
    for (int64_t u = 0; u < static_cast<int64_t>(schedule_.units.size()); ++u) {
      if (!costs(u).trainable) continue;
      const size_t up = machine_.move(Resource::up, Work::copy, u, costs(u).update_up, ended);
      machine_.move(Resource::link, Work::gather, u, costs(u).publish, up);
    }
  }

  // Updates a unit when `need` is done.
  size_t update(int64_t unit, size_t need) {
    const auto& cost = costs(unit);
    return machine_.add({.resource = cost.updated_on_host ? Resource::host : Resource::compute,
                         .work = Work::update,
                         .unit = unit,
                         .bytes = cost.update},
                        seconds_of(static_cast<double>(cost.update), machine_.speeds().update),
                        {need});
  }

  void updates() {
    for (int64_t u = 0; u < static_cast<int64_t>(schedule_.units.size()); ++u) {
      if (reduced_[static_cast<size_t>(u)] == 0) continue;
      const size_t sum = machine_.move(Resource::link, Work::reduce, u, costs(u).reduce_at_end,
                                       computed_, gradients_);
      gradients_ = machine_.later(gradients_, sum);
    }
    const size_t begun = machine_.later(gradients_, computed_);  // then the norm is known
    std::vector<int64_t> units;
    for (int64_t u = 0; u < static_cast<int64_t>(schedule_.units.size()); ++u) {
      const bool done = costs(u).updated_in_gather && gathered_[static_cast<size_t>(u)] != 0;
      if (costs(u).trainable && !done) units.push_back(u);
    }
    const auto read = [&](int64_t unit) {
      return machine_.move(Resource::disk, Work::read, unit, costs(unit).update_read, begun);
    };
    size_t here = units.empty() ? kNone : read(units.front());
    for (size_t i = 0; i < units.size(); ++i) {
      const int64_t unit = units[i];
      const auto& cost = costs(unit);
      const size_t states = here;
      if (i + 1 < units.size()) here = read(units[i + 1]);  // beside this update
      const size_t down =
          machine_.move(Resource::down, Work::copy, unit, cost.update_down, begun, states);
      const size_t updated = update(unit, down);
      machine_.move(Resource::disk, Work::write, unit, cost.update_write, updated);
      const size_t up = machine_.move(Resource::up, Work::copy, unit, cost.update_up, updated);
      machine_.move(Resource::link, Work::gather, unit, cost.publish, up);
    }
  }

  // Sets the exposed times: Note [Exposed time].
  static void expose(SimulatedStep& step) {
    const auto charge = [&](double begin, double end, size_t chain) {
      while (end > begin && chain != kNone) {
        const auto& task = step.tasks[chain];
        const double from = std::max(begin, std::min(task.begin, end));
        const double until = std::min(end, task.end);
        if (until > from) step.exposed[index(task.resource)] += until - from;
        end = std::min(end, from);
        chain = task.waited_for;
      }
    };
    double idle = 0;  // begin of the gap
    size_t last = kNone;
    for (size_t t = 0; t < step.tasks.size(); ++t) {
      const auto& task = step.tasks[t];
      if (last == kNone || task.end > step.tasks[last].end) last = t;
      if (task.resource != Resource::compute) continue;
      charge(idle, task.begin, task.waited_for);
      idle = task.end;
    }
    charge(idle, step.seconds, last);
  }

  // Returns the most bytes of gathered units if the pager follows the plan.
  int64_t live_bytes() const {
    std::vector<uint8_t> live(schedule_.units.size(), 0);
    int64_t now = 0;
    int64_t most = 0;
    size_t next = 0;
    const auto& touches = plan_.trace.touches();
    for (size_t p = 0; p < plan_.trace.operators(); ++p) {
      for (; next < plan_.gathers.size() && plan_.gathers[next].start <= p; ++next) {
        live[static_cast<size_t>(plan_.gathers[next].unit)] = 1;
        now += costs(plan_.gathers[next].unit).bytes;
      }
      most = std::max(most, now);
      for (size_t i = plan_.trace.begin(p); i < plan_.trace.begin(p + 1); ++i) {
        auto& there = live[static_cast<size_t>(touches[i])];
        if (plan_.keep[i] == 0 && std::exchange(there, 0) != 0) now -= costs(touches[i]).bytes;
      }
    }
    return most;
  }

  const StepSchedule& schedule_;
  Plan plan_;
  Machine machine_;
  std::vector<size_t> arrived_;    // the last gather of each unit
  std::vector<uint8_t> reduced_;   // by unit, in this step
  std::vector<uint8_t> gathered_;  // by unit, in this step
  std::vector<size_t> read_;       // the read of each gather
  size_t next_ = 0;                // index into the plan's gathers
  size_t next_read_ = 0;           // index of the next gather whose slice is read
  int64_t ahead_bytes_ = 0;        // bytes that were read and not gathered yet
  size_t computed_ = kNone;        // the last operator
  size_t under_way_ = kNone;       // the last reduction
  int64_t unit_under_way_ = -1;    // the unit that is reduced, whose update then begins
  size_t kept_under_way_ = kNone;  // the task that brings its sum
  int64_t updated_beside_ = -1;    // the unit whose update beside other work was begun last
  size_t begun_update_ = kNone;    // the task that brings what that update needs
  size_t updated_ = kNone;         // the last update beside other work
  size_t stalled_ = kNone;    // the reduction before that one; the next operators fill its bucket
  size_t gradients_ = kNone;  // the task that brings the last gradient
};

}  // namespace

std::string_view name(Resource resource) {
  constexpr std::array<std::string_view, kResources> kNames{"compute",     "link", "to the device",
                                                            "to the host", "disk", "host"};
  return kNames[index(resource)];
}

std::string_view name(Work work) {
  constexpr std::array<std::string_view, 8> kNames{"forward", "backward", "gather", "reduce",
                                                   "update",  "copy",     "read",   "write"};
  return kNames[static_cast<size_t>(work)];
}

std::vector<int64_t> StepSchedule::unit_bytes() const {
  std::vector<int64_t> bytes;
  for (const auto& unit : units) bytes.push_back(unit.bytes);
  return bytes;
}

Plan StepSchedule::plan() const {
  auto plan = make_plan(trace, unit_bytes(),
                        {.budget_bytes = budget_bytes, .prefetch_bytes = prefetch_bytes});
  if (!gathers) plan.gathers.clear();
  return plan;
}

double SimulatedStep::exposed_seconds() const {
  double sum = 0;
  for (const double each : exposed) sum += each;
  return sum;
}

SimulatedStep simulate(const StepSchedule& schedule, const Speeds& speeds) {
  ensure(schedule.flops.size() == schedule.trace.operators() &&
             schedule.backward.size() == schedule.trace.operators(),
         "every operator of a schedule has its FLOPs and its pass");
  return Run(schedule, speeds).finish();
}

PrefetchChoice choose_prefetch(StepSchedule schedule, const Speeds& speeds, double tolerance) {
  const int64_t most = std::min(schedule.prefetch_bytes, schedule.budget_bytes);
  std::set<int64_t> distances{0, most};
  auto sizes = schedule.unit_bytes();
  std::ranges::sort(sizes);
  if (!sizes.empty()) {
    // Each distance has one unit more than the one before, and later half as many more, since a
    // single unit matters less and less.
    for (const int64_t size : {sizes[sizes.size() / 2], sizes.back()}) {
      for (int64_t units = 1; size > 0 && units * size < most;
           units += std::max<int64_t>(1, units / 2))
        distances.insert(units * size);
    }
  }
  std::vector<PrefetchChoice> tried;
  for (const int64_t bytes : distances) {
    schedule.prefetch_bytes = bytes;
    const auto step = simulate(schedule, speeds);
    tried.push_back(
        {.prefetch_bytes = bytes, .seconds = step.seconds, .live_bytes = step.live_bytes});
  }
  double best = tried.front().seconds;
  for (const auto& each : tried) best = std::min(best, each.seconds);
  auto chosen = *std::find_if(tried.begin(), tried.end(), [&](const PrefetchChoice& each) {
    return each.seconds <= best * (1 + tolerance);
  });
  chosen.best_seconds = best;
  chosen.on_demand_seconds = tried.front().seconds;
  return chosen;
}

void leave_out_first_use(StepSchedule& schedule, int64_t unit) {
  const auto whole = schedule.trace;
  size_t first = 0;
  while (first < whole.operators() && std::ranges::count(whole.units(first), unit) == 0) ++first;
  if (first + 1 >= whole.operators() || whole.units(first).size() > 1) return;
  schedule.trace.clear();
  for (size_t p = 0; p < whole.operators(); ++p) {
    if (p != first) schedule.trace.record(whole.units(p));
  }
  const auto at = static_cast<ptrdiff_t>(first);
  schedule.flops[first + 1] += schedule.flops[first];
  schedule.flops.erase(schedule.flops.begin() + at);
  schedule.backward.erase(schedule.backward.begin() + at);
  for (auto& each : schedule.reductions) each.after -= each.after > first ? 1 : 0;
}

}  // namespace zero::paging
