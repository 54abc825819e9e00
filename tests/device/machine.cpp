#include "tests/device/machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tests/device/places.h"

namespace zero::simulated {

namespace {

thread_local int thread_device = -1;  // -1: the thread has done nothing yet
thread_local std::array<int, kDevices> thread_streams{};

const std::string kFree = "free";

}  // namespace

int current_device() { return std::max(thread_device, 0); }

int exchange_current_device(int device) {
  TORCH_CHECK(device < kDevices, "simulated device: there is no device ", device, ", only ",
              kDevices);
  const int before = current_device();
  if (device < 0 || device == thread_device) return before;
  if (thread_device >= 0) Machine::instance().change_host(thread_device, device);
  thread_device = device;
  return before;
}

HostScope::HostScope(int device) : before_(std::exchange(thread_device, device)) {}
HostScope::~HostScope() { thread_device = before_; }

Actor current_actor(int device) {
  return device * kStreams + thread_streams[static_cast<size_t>(device)];
}
Actor exchange_current_actor(Actor stream) {
  const int device = device_of(stream);
  return device * kStreams +
         std::exchange(thread_streams[static_cast<size_t>(device)], stream % kStreams);
}

Machine& Machine::instance() {
  static auto* machine = new Machine;
  return *machine;
}

void Machine::configure(const Options& options) {
  const auto lock = streams_.lock();
  for (const Released& released : std::exchange(released_, {})) release_on_stream(released.block);
  checker_.take_reports();
  checker_.reset_counts();
  for (Actor s = 0; s < kAllStreams; ++s) checker_.number_from(s, streams_.last(s));
  streams_.configure(options.executor, options.seed, options.delay);
  options_ = options;
  counts_ = {};
  for (auto& waits : waits_) waits.clear();
}

// ---- clocks

Clock& Machine::own_host() {
  thread_device = current_device();
  return clock(host_of(thread_device));
}

void Machine::change_host(int from, int to) {
  const auto lock = streams_.lock();
  learn(clock(host_of(to)), clock(host_of(from)));
}

// A host has learned something: what all hosts know need not be compared any more.
void Machine::learn(Clock& host, const Clock& what) {
  host.join(what);
  Clock known = host;
  for (int device = 0; device < kDevices; ++device) known.meet(clock(host_of(device)));
  checker_.forget(known);
}

Mark Machine::mark(Actor stream) {
  clock(stream).join(own_host());
  return {.stream = stream, .task = streams_.last(stream), .clock = clock(stream)};
}

bool Machine::reached(const Mark& mark) const {
  return mark.stream < 0 || streams_.done(mark.stream, mark.task);
}

// ---- work

void Machine::enqueue(Actor stream, Task task, const std::vector<Range>& ranges) {
  Clock& own = clock(stream);
  own.join(own_host());
  own[stream] = streams_.last(stream) + 1;
  if (options_.check) {
    for (const Range& range : ranges) {
      checker_.access({stream, own[stream], task.name, own}, range);
    }
  }
  streams_.enqueue(stream, std::move(task));
}

void Machine::launch(Actor stream, const std::string& name, const std::vector<Range>& ranges,
                     std::function<void()> body) {
  const auto lock = streams_.lock();
  ++counts_.tasks;
  enqueue(stream, {.name = name, .body = std::move(body)}, ranges);
}

void Machine::host_access(const std::string& name, const Range& range) {
  const auto lock = streams_.lock();
  Clock& host = own_host();
  const Actor actor = host_of(current_device());
  ++host[actor];
  if (options_.check) checker_.access({actor, host[actor], name, host}, range);
}

void Machine::forget(const void* data, size_t bytes) {
  const auto lock = streams_.lock();
  checker_.forget(data, bytes);
}

void Machine::hosts_met() {
  const auto lock = streams_.lock();
  Clock all;
  for (int device = 0; device < kDevices; ++device) all.join(clock(host_of(device)));
  for (int device = 0; device < kDevices; ++device) learn(clock(host_of(device)), all);
}

// ---- waits

void Machine::order(Actor stream, const Mark& after) {
  const auto lock = streams_.lock();
  if (after.stream < 0 || after.stream == stream) return;
  join_and_wait(stream, after);
}

// The clock first: the wait itself already knows what it waited for.
void Machine::join_and_wait(Actor stream, const Mark& mark) {
  clock(stream).join(mark.clock);
  enqueue(stream,
          {.name = "wait", .body = nullptr, .after_stream = mark.stream, .after_task = mark.task},
          {});
}

Mark Machine::record(Actor stream) {
  const auto lock = streams_.lock();
  return mark(stream);
}

void Machine::wait(Actor stream, const Mark& mark) {
  const auto lock = streams_.lock();
  if (mark.stream < 0 || mark.stream == stream) return;
  const auto host = static_cast<size_t>(current_device());
  waits_[host].push_back(
      {.text = name_of(stream) + ", after its task " +
               std::to_string(checker_.number_of(stream, streams_.last(stream))) + ", for " +
               name_of(mark.stream) + " after its task " +
               std::to_string(checker_.number_of(mark.stream, mark.task)),
       .calls = options_.places ? calls_under_way() : std::vector<void*>()});
  ++counts_.waits;
  if (left_out(counts_.waits_by_host[host], &Options::left_out_wait)) return;
  join_and_wait(stream, mark);
}

// Counts a wait of this thread's host; whether it is the one that does not happen.
bool Machine::left_out(int64_t& number, int64_t Options::*which) {
  return number++ == options_.*which && options_.left_out_host == current_device();
}

bool Machine::query(const Mark& mark) {
  const auto lock = streams_.lock();
  if (!reached(mark)) return false;
  learn(own_host(), mark.clock);
  return true;
}

bool Machine::idle(Actor stream) {
  const auto lock = streams_.lock();
  const Mark all = mark(stream);
  if (!reached(all)) return false;
  learn(own_host(), all.clock);
  return true;
}

void Machine::wait_for(Streams::Lock& lock, const Mark& mark, const std::string& cause) {
  ++counts_.host_waits;
  ++counts_.host_waits_by_cause[cause];
  if (mark.stream >= 0) streams_.wait(lock, mark.stream, mark.task);
  learn(own_host(), mark.clock);
  throw_failure();
}

void Machine::throw_failure() {
  const std::string failure = streams_.take_failure();
  TORCH_CHECK(failure.empty(), "simulated device: a task failed. ", failure);
}

void Machine::host_wait(const Mark& mark, const std::string& cause, bool numbered) {
  auto lock = streams_.lock();
  auto& number = counts_.own_waits_by_host[static_cast<size_t>(current_device())];
  if (numbered && left_out(number, &Options::left_out_host_wait)) return;
  wait_for(lock, mark, cause);
}

void Machine::host_wait_for_stream(Actor stream, const std::string& cause, bool numbered) {
  auto lock = streams_.lock();
  auto& number = counts_.own_waits_by_host[static_cast<size_t>(current_device())];
  if (numbered && left_out(number, &Options::left_out_host_wait)) return;
  wait_for(lock, mark(stream), cause);
}

void Machine::host_wait_for_device(int device, const std::string& cause) {
  auto lock = streams_.lock();
  ++counts_.host_waits;
  ++counts_.host_waits_by_cause[cause];
  for (Actor s = device * kStreams; s < (device + 1) * kStreams; ++s) {
    const Mark all = mark(s);
    streams_.wait(lock, s, all.task);
    learn(own_host(), all.clock);
  }
  throw_failure();
}

void Machine::host_wait_for_all() {
  for (int device = 0; device < kDevices; ++device) host_wait_for_device(device, "synchronize");
  hosts_met();
}

// ---- memory

void* Machine::allocate(size_t bytes, Actor stream) {
  if (bytes == 0) return nullptr;
  const auto lock = streams_.lock();
  reuse_released();
  return memory_.take(bytes, stream, options_.memory_bytes, options_.poison).data;
}

// Blocks that other streams used, by record_stream, and use no more. To find that out is a query
// of events, by this host.
void Machine::reuse_released() {
  std::erase_if(released_, [&](const Released& released) {
    for (const Mark& use : released.uses) {
      if (!reached(use)) return false;
    }
    for (const Mark& use : released.uses) learn(own_host(), use.clock);
    release_on_stream(released.block);
    return true;
  });
}

void Machine::release(void* pointer) {
  if (pointer == nullptr) return;
  const auto lock = streams_.lock();
  const Memory::Block* block = memory_.find(pointer);
  TORCH_CHECK(block != nullptr && block->data == pointer, "simulated device: ", pointer,
              " is released, but not allocated");
  if (block->used_on.empty()) {
    release_on_stream(memory_.remove(pointer));
    return;
  }
  // It may be handed out again as soon as these uses are done, whatever others there are.
  std::vector<Mark> uses;
  Clock by_then = mark(block->stream).clock;
  for (const Actor stream : block->used_on) {
    uses.push_back(mark(stream));
    by_then.join(uses.back().clock);
  }
  if (options_.check) {
    const uint64_t next = streams_.last(block->stream) + 1;
    checker_.will_be_freed({block->stream, next, kFree, by_then}, *block);
  }
  released_.push_back({memory_.remove(pointer), std::move(uses)});
}

void Machine::release_on_stream(const Memory::Block& block) {
  Clock& own = clock(block.stream);
  own.join(own_host());
  if (options_.poison) own[block.stream] = streams_.last(block.stream) + 1;
  if (options_.check) checker_.free({block.stream, own[block.stream], kFree, own}, block);
  if (options_.poison) {
    streams_.enqueue(
        block.stream,
        {.name = kFree, .body = [data = Memory::backing(block.data), bytes = block.bytes] {
           std::memset(data, 0xff, bytes);
         }});
  }
  memory_.give_back(block);
}

void Machine::record_stream(const void* pointer, Actor stream) {
  const auto lock = streams_.lock();
  Memory::Block* block = memory_.find(pointer);
  if (block != nullptr && block->stream != stream) block->used_on.insert(stream);
}

int Machine::device_of_pointer(const void* pointer) {
  const auto lock = streams_.lock();
  const Memory::Block* block = memory_.find(pointer);
  return block == nullptr ? current_device() : device_of(block->stream);
}

Memory::Usage Machine::usage(int device) {
  const auto lock = streams_.lock();
  return memory_.usage(device);
}
void Machine::reset_peak(int device) {
  const auto lock = streams_.lock();
  memory_.reset_peak(device);
}
void Machine::empty_cache() {
  const auto lock = streams_.lock();
  memory_.empty_cache();
}

size_t Machine::memory_limit() {
  const auto lock = streams_.lock();
  return options_.memory_bytes;
}

void* Machine::allocate_pinned(size_t bytes) {
  constexpr size_t kPage = 4096;
  void* pointer = std::aligned_alloc(kPage, (bytes / kPage + 1) * kPage);
  TORCH_CHECK(pointer != nullptr, "simulated device: no ", bytes, " bytes of host memory");
  const auto lock = streams_.lock();
  pinned_[reinterpret_cast<uintptr_t>(pointer)] = bytes;
  return pointer;
}

void Machine::release_pinned(void* pointer) {
  {
    const auto lock = streams_.lock();
    const auto found = pinned_.find(reinterpret_cast<uintptr_t>(pointer));
    if (found != pinned_.end()) {
      checker_.forget(pointer, found->second);  // copies under way keep it
      pinned_.erase(found);
    }
  }
  std::free(pointer);  // NOLINT(cppcoreguidelines-no-malloc)
}

bool Machine::pinned(const void* pointer) {
  const auto lock = streams_.lock();
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  auto after = pinned_.upper_bound(address);
  if (after == pinned_.begin()) return false;
  --after;
  return address < after->first + std::max<size_t>(after->second, 1);
}

// ---- counts

void Machine::count_operator() {
  const auto lock = streams_.lock();
  ++counts_.operators;
}
void Machine::count_shadow_run() {
  const auto lock = streams_.lock();
  ++counts_.shadow_runs;
}
Counts Machine::counts() {
  const auto lock = streams_.lock();
  Counts counts = counts_;
  counts.accesses = checker_.accesses();
  return counts;
}
Machine::Wait Machine::wait_number(int host, int64_t number) {
  const auto lock = streams_.lock();
  const auto& waits = waits_.at(static_cast<size_t>(host));
  if (number < 0 || number >= static_cast<int64_t>(waits.size())) return {"no wait", {}};
  return waits[static_cast<size_t>(number)];
}
std::string Machine::describe_wait(int host, int64_t number) {
  return wait_number(host, number).text;
}
std::string Machine::place_of_wait(int host, int64_t number) {
  return place_of(wait_number(host, number).calls);
}
std::vector<std::string> Machine::take_reports() {
  const auto lock = streams_.lock();
  return checker_.take_reports();
}

}  // namespace zero::simulated
