// A rank's record of what it does in a step, and when.
//
// Note [Timeline]
// The thread that trains has nested scopes: phases (forward, backward, step) and the waits in them.
// A gather, a reduction, an update or a transfer of a disk is under way from its start to its end,
// on any thread, and several may be at a time. A timeline that is on keeps these spans, or adds up
// the phases and their waits, or both. A timeline that is off costs a branch for each span, and
// holds no memory.
//
// A wait is counted once: a wait for a disk within an update counts for the disk. A phase within
// another (a forward that a backward pass runs) counts for the inner phase.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

namespace zero {

enum class Activity : uint8_t {
  // Phases of a step, on the thread that trains.
  forward,
  backward,
  step,
  operation,  ///< an operator of LibTorch, on that thread
  // Waits of that thread.
  wait_gather,
  wait_reduce,
  wait_update,
  wait_disk,
  wait_control,
  // Activities under way.
  gather,      ///< parameters of a unit; bytes as the traffic ledger counts them
  reduce,      ///< gradients of a unit; bytes as above
  control,     ///< scalars and checks; bytes as above
  update,      ///< a unit through the optimizer; bytes of this rank's parameters
  disk_read,   ///< bytes of the file
  disk_write,  ///< bytes of the file
};
inline constexpr size_t kActivities = 15;
/// Returns "forward", "wait for gather", "disk read", ...
std::string_view name(Activity activity);
constexpr bool is_phase(Activity activity) { return activity <= Activity::step; }
constexpr bool is_wait(Activity activity) {
  return activity >= Activity::wait_gather && activity <= Activity::wait_control;
}

struct Span {
  int64_t begin = 0;  ///< nanoseconds of std::chrono::steady_clock
  int64_t end = 0;
  int64_t bytes = 0;
  Activity activity{};
  bool training = false;        ///< a scope of the thread that trains
  std::array<char, 94> text{};  ///< name of its object (a unit); longer names are cut

  std::string_view label() const;
};

/// The milliseconds of the phases of the thread that trains, and how much of them it has spent
/// waiting.
struct Breakdown {
  double forward = 0;
  double backward = 0;
  double step = 0;
  double gather = 0;   ///< waiting for parameters
  double reduce = 0;   ///< waiting for gradients
  double update = 0;   ///< spent on updates: running them or waiting for them
  double disk = 0;     ///< waiting for a disk
  double control = 0;  ///< waiting for other ranks' scalars and checks
};

/// Thread-safe, except for `start`, `stop`, `measure` and `take_breakdown`, which belong to the
/// thread that trains.
class Timeline {
 public:
  static constexpr size_t kSpans = size_t{1} << 17;

  /// Returns the nanoseconds of std::chrono::steady_clock.
  static int64_t now();

  /// Keeps spans from now on, at most `most`, and takes memory for them now (128 bytes each).
  /// Forgets earlier spans. The caller becomes the thread that trains.
  void start(size_t most = kSpans);
  /// Keeps no further spans, except those under way when they end. Kept spans stay.
  void stop();
  /// Returns the spans in the order in which they ended.
  std::vector<Span> spans() const;
  /// Returns the number of spans that did not fit.
  int64_t dropped() const;
  /// Gives the memory back, and keeps no more spans.
  void clear();

  /// Begins to add up phases and waits, or stops. The caller becomes the thread that trains.
  void measure(bool on);
  /// Returns the sums since the last call.
  Breakdown take_breakdown();

  /// Returns true if spans are kept or added up. A caller that must prepare a span asks first.
  bool on() const { return on_.load(std::memory_order_relaxed); }
  bool keeps() const { return keeps_.load(std::memory_order_relaxed); }
  /// Records an activity that was under way from `begin` to `end`.
  void add(Activity activity, std::string_view label, int64_t begin, int64_t end,
           int64_t bytes = 0);

  /// Records a span of this thread that lasts as long as this object. A wait counts only on the
  /// thread that trains. The label must live as long as the scope.
  class Scope {
   public:
    Scope(Timeline& timeline, Activity activity, std::string_view label = {}, int64_t bytes = 0) {
      if (timeline.on()) begin(timeline, activity, label, bytes);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ~Scope() {
      if (timeline_ != nullptr) end();
    }

   private:
    friend class Timeline;
    void begin(Timeline& timeline, Activity activity, std::string_view label, int64_t bytes);
    void end();

    Timeline* timeline_ = nullptr;
    Scope* outer_ = nullptr;  // the thread that trains made it
    bool training_ = false;
    Activity activity_{};
    std::string_view label_;
    int64_t bytes_ = 0;
    int64_t begin_ = 0;
    int64_t inner_waits_ = 0;   // nanoseconds of the scopes inside
    int64_t inner_phases_ = 0;  // nanoseconds of the waits inside
  };

 private:
  void adopt_thread();
  void set(std::atomic<bool>& what, bool on);
  void keep(const Span& span);  // the caller holds the mutex

  std::atomic<bool> on_{false};
  std::atomic<bool> keeps_{false};
  std::atomic<bool> measures_{false};
  std::atomic<uint64_t> thread_{0};  // the thread that trains
  Scope* top_ = nullptr;             // the innermost scope of that thread
  mutable std::mutex mutex_;         // guards the fields below
  std::vector<Span> spans_;
  size_t most_ = 0;
  int64_t started_ = 0;  // Timeline::now()
  int64_t stopped_ = 0;
  int64_t dropped_ = 0;
  std::array<int64_t, kActivities> nanoseconds_{};  // in phases
};

}  // namespace zero
