// The race detector: compares every access to memory with the unordered ones before it. See Note
// [Happens before] in device.h. Not thread-safe: the machine's mutex protects it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/device/clock.h"
#include "tests/device/memory.h"

namespace zero::simulated {

class Checker {
 public:
  explicit Checker(Memory& memory) : memory_(memory) {}

  /// The access's thread of work: its number `task`, and the accesses that it knows to have come
  /// before.
  struct Operation {
    Actor actor;
    uint64_t task;
    const std::string& name;
    const Clock& clock;
  };
  /// An operator, a copy or the host reads or writes. Reports what races with it, and memory of the
  /// device that is not allocated.
  void access(const Operation& operation, const Range& range);
  /// A block is freed on its stream: what is enqueued there next may write it.
  void free(const Operation& operation, const Memory::Block& block);
  /// The same of a block that is freed later, when what `operation` knows is done: what races with
  /// that is reported now, and nothing is kept.
  void will_be_freed(const Operation& operation, const Memory::Block& block);
  /// Host memory that is free, and nothing is under way with: who gets it next, another rank of the
  /// process perhaps, has nothing to do with what was done to it.
  void forget(const void* data, size_t bytes);
  /// Everything that all active hosts know: such accesses cannot race any more.
  void forget(const Clock& known_to_all) { known_ = known_to_all; }

  /// Reports number a stream's tasks from here on.
  void number_from(Actor stream, uint64_t task) { first_task_[stream] = task; }
  /// The number of a task in reports.
  uint64_t number_of(Actor stream, uint64_t task) const { return task - first_task_[stream]; }

  std::vector<std::string> take_reports();
  int64_t accesses() const { return accesses_; }
  void reset_counts() { accesses_ = 0; }

 private:
  struct Access {
    uintptr_t low, high;
    Actor actor;
    uint64_t task;
    bool write, frees;
    size_t row_bytes, row_stride;
    std::string name;
    bool touches(const Access& other) const;
    bool covers(const Access& other) const;
  };
  struct Report {
    std::string text;
    int64_t times;
  };
  static Access whole_of(const Operation& operation, const Memory::Block& block);
  static bool ordered(const Access& earlier, const Access& access, const Clock& clock);
  void compare(const Access& access, const Clock& clock);
  void report_race(const Access& first, const Access& second);
  void report(const std::string& key, const std::string& text);

  Memory& memory_;
  Clock known_;
  Clock first_task_;
  std::unordered_map<uintptr_t, std::vector<Access>> accesses_by_page_;
  std::vector<std::string> order_;  // of the reports' keys
  std::map<std::string, Report> reports_;
  int64_t accesses_ = 0;
};

}  // namespace zero::simulated
