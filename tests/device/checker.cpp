#include "tests/device/checker.h"

#include <algorithm>
#include <utility>

namespace zero::simulated {

namespace {

constexpr unsigned kPageBits = 16;  // accesses are looked up by 64 KiB of addresses

}  // namespace

void Checker::access(const Operation& operation, const Range& range) {
  if (range.bytes == 0) return;
  ++accesses_;
  const auto low = reinterpret_cast<uintptr_t>(range.data);
  if (memory_.owns(range.data)) {
    const Memory::Block* block = memory_.find(range.data);
    const char* end = static_cast<const char*>(range.data) + range.bytes;
    if (block == nullptr || end > block->data + block->bytes) {
      report("unallocated " + operation.name + name_of(operation.actor),
             "memory that is not allocated: " + operation.name + " (" + name_of(operation.actor) +
                 ", its task " + std::to_string(number_of(operation.actor, operation.task)) + ") " +
                 (range.write ? "writes " : "reads ") + std::to_string(range.bytes) +
                 " bytes of the device that were freed before it was enqueued, or never "
                 "allocated.");
    }
  }
  compare({.low = low,
           .high = low + range.bytes,
           .actor = operation.actor,
           .task = operation.task,
           .write = range.write,
           .frees = false,
           .row_bytes = range.row_bytes,
           .row_stride = range.row_stride,
           .name = operation.name},
          operation.clock);
}

Checker::Access Checker::whole_of(const Operation& operation, const Memory::Block& block) {
  const auto low = reinterpret_cast<uintptr_t>(block.data);
  return {.low = low,
          .high = low + block.bytes,
          .actor = operation.actor,
          .task = operation.task,
          .write = true,
          .frees = true,
          .row_bytes = 0,
          .row_stride = 0,
          .name = operation.name};
}

void Checker::free(const Operation& operation, const Memory::Block& block) {
  ++accesses_;
  compare(whole_of(operation, block), operation.clock);
}

void Checker::will_be_freed(const Operation& operation, const Memory::Block& block) {
  const Access release = whole_of(operation, block);
  for (auto page = release.low >> kPageBits; page <= (release.high - 1) >> kPageBits; ++page) {
    for (const Access& earlier : accesses_by_page_[page]) {
      if (earlier.task <= known_[earlier.actor] || !release.touches(earlier)) continue;
      if (!ordered(earlier, release, operation.clock)) report_race(earlier, release);
    }
  }
}

void Checker::forget(const void* data, size_t bytes) {
  if (bytes == 0) return;
  const auto low = reinterpret_cast<uintptr_t>(data);
  const auto high = low + bytes;
  for (auto page = low >> kPageBits; page <= (high - 1) >> kPageBits; ++page) {
    std::erase_if(accesses_by_page_[page],
                  [&](const Access& a) { return a.low < high && low < a.high; });
  }
}

bool Checker::ordered(const Access& earlier, const Access& access, const Clock& clock) {
  return earlier.actor == access.actor || clock[earlier.actor] >= earlier.task;
}

// Rows of the same stride, as columns of one matrix have, may lie beside each other.
bool Checker::Access::touches(const Access& other) const {
  if (other.low >= high || low >= other.high) return false;
  if (row_stride == 0 || row_stride != other.row_stride) return true;
  const Access& first = low <= other.low ? *this : other;
  const Access& second = low <= other.low ? other : *this;
  const uintptr_t offset = (second.low - first.low) % row_stride;
  return offset < first.row_bytes || offset + second.row_bytes > row_stride;
}

bool Checker::Access::covers(const Access& other) const {
  if (other.low < low || other.high > high) return false;
  return row_stride == 0 ||
         (row_stride == other.row_stride && low == other.low && row_bytes >= other.row_bytes);
}

void Checker::compare(const Access& access, const Clock& clock) {
  for (auto page = access.low >> kPageBits; page <= (access.high - 1) >> kPageBits; ++page) {
    auto& list = accesses_by_page_[page];
    std::erase_if(list, [&](const Access& earlier) {
      if (earlier.task <= known_[earlier.actor]) return true;
      if (!access.touches(earlier)) return false;
      const bool in_order = ordered(earlier, access, clock);
      if (!in_order && (earlier.write || access.write)) report_race(earlier, access);
      // Whatever races with the earlier one later on races with this one too.
      return in_order && access.covers(earlier) &&
             (access.write || (!earlier.write && earlier.actor == access.actor));
    });
    list.push_back(access);
  }
}

void Checker::report_race(const Access& first, const Access& second) {
  const auto what = [](const Access& a) {
    if (a.frees) return "the release of the memory";
    return a.write ? "the write by" : "the read by";
  };
  const auto label = [&](const Access& a) {
    std::string text = what(a);
    if (!a.frees) text += " " + a.name;
    text += " (" + name_of(a.actor);
    if (!is_host(a.actor)) text += ", its task " + std::to_string(number_of(a.actor, a.task));
    return text + ")";
  };
  // A place in a stream's work that an event has to be recorded at.
  const auto after = [&](const Access& a) {
    return "after its task " + std::to_string(number_of(a.actor, a.task));
  };
  const auto low = std::max(first.low, second.low);
  const auto high = std::min(first.high, second.high);
  const auto* data = reinterpret_cast<const char*>(low);  // NOLINT(performance-no-int-to-ptr)
  std::string place = "host memory";
  if (memory_.owns(data)) {
    place = "device memory";
    if (const auto* block = memory_.find(data)) {
      const auto offset = static_cast<size_t>(data - block->data);
      place = "bytes " + std::to_string(offset) + " to " + std::to_string(offset + (high - low)) +
              " of a block of " + std::to_string(block->bytes) + " (allocated on " +
              name_of(block->stream) + ")";
    }
  }
  std::string missing;
  if (is_host(first.actor)) {
    missing = "the two hosts have to meet before (hosts_met says that they did)";
  } else if (second.frees) {
    missing = "record_stream(" + name_of(first.actor) + ") before the release, or " +
              name_of(second.actor) + " waits before it for an event recorded on " +
              name_of(first.actor) + " " + after(first);
  } else if (is_host(second.actor)) {
    missing = name_of(second.actor) + " has to wait for " + name_of(first.actor) +
              ", or for an event recorded there " + after(first);
  } else {
    missing = name_of(second.actor) + " has to wait for an event recorded on " +
              name_of(first.actor) + " " + after(first);
  }
  // A pair of operations that comes again, as in each step, is one report.
  const auto kind = [&](const Access& a) { return a.name + what(a) + name_of(a.actor); };
  const bool rows = first.row_stride > 0 || second.row_stride > 0;
  report(kind(first) + kind(second), "race on " + std::string(rows ? "rows of " : "") +
                                         std::to_string(high - low) + " bytes, " + place + ": " +
                                         label(second) + " is not ordered after " + label(first) +
                                         ". Missing: " + missing + ".");
}

void Checker::report(const std::string& key, const std::string& text) {
  const auto [found, fresh] = reports_.try_emplace(key, Report{text, 0});
  if (fresh) order_.push_back(key);
  ++found->second.times;
}

std::vector<std::string> Checker::take_reports() {
  std::vector<std::string> texts;
  for (const auto& key : std::exchange(order_, {})) {
    const Report& found = reports_.at(key);
    texts.push_back(found.text +
                    (found.times > 1 ? " (" + std::to_string(found.times) + " times alike)" : ""));
  }
  reports_.clear();
  return texts;
}

}  // namespace zero::simulated
