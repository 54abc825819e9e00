#include "tests/device/device.h"

#include <utility>

#include "tests/device/machine.h"

namespace zero::simulated {

void configure(const Options& options) {
  try {
    synchronize();
  } catch (const std::exception&) {  // of a task of the run before, which is over
  }
  synchronize();
  Machine::instance().configure(options);
}

c10::Device device(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }
c10::Stream stream(int id, int index) {
  return c10::Stream(c10::Stream::UNSAFE, device(index), id);
}
c10::Stream current_stream(int index) { return stream(current_actor(index) % kStreams, index); }

void synchronize() { Machine::instance().host_wait_for_all(); }
void hosts_met() { Machine::instance().hosts_met(); }

void launch(const char* name, const std::vector<Range>& ranges, std::function<void()> body) {
  Machine::instance().launch(current_actor(current_device()), name, ranges, std::move(body));
}

void* backing(const void* pointer) {
  return Machine::instance().owns(pointer) ? Memory::backing(pointer) : const_cast<void*>(pointer);
}

void host_access(const char* what, const Range& range) {
  Machine::instance().host_access(what, range);
}

void* allocate(size_t bytes) {
  return Machine::instance().allocate(bytes, current_actor(current_device()));
}
void release(void* pointer) { Machine::instance().release(pointer); }

std::vector<std::string> take_reports() { return Machine::instance().take_reports(); }
Counts counts() { return Machine::instance().counts(); }
std::string describe_wait(int host, int64_t number) {
  return Machine::instance().describe_wait(host, number);
}
std::string place_of_wait(int host, int64_t number) {
  return Machine::instance().place_of_wait(host, number);
}

}  // namespace zero::simulated
