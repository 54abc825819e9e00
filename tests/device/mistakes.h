// Mistakes that are made by hand, and what they share. Each is a small schedule of a step that does
// the right thing or, if so asked, makes one mistake: the checker must report it in every run,
// whatever the results were, and say nothing of the schedule without it. They are of the kinds that
// FSDP, DeepSpeed and Megatron have had; where a comment names an issue, it is that one's pattern.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <ostream>
#include <string>
#include <vector>

#include "tests/device/testing.h"

namespace zero::simulated {

struct Mistake {
  const char* name;
  void (*run)(bool mistake);
  std::string says;  ///< what a report of it contains
};
inline void PrintTo(const Mistake& mistake, std::ostream* to) { *to << mistake.name; }

/// The events between streams of one device: who waits for whom, and when the event is recorded.
std::vector<Mistake> mistakes_with_events();
/// The life of device memory that several streams use.
std::vector<Mistake> mistakes_with_memory();
/// Pinned memory that the host and copies use.
std::vector<Mistake> mistakes_with_the_host();
/// Backward: its hooks and its branches.
std::vector<Mistake> mistakes_in_a_step();
/// Around the collectives of ranks.
std::vector<Mistake> mistakes_with_collectives();
/// Memory that ranks read and write in place at each other's.
std::vector<Mistake> mistakes_with_peers();

// ---- what reports say is missing

inline std::string wait_of(int waits, int for_stream, int device = 0, int of_device = 0) {
  return "stream " + std::to_string(waits) + " of device " + std::to_string(device) +
         " has to wait for an event recorded on stream " + std::to_string(for_stream) +
         " of device " + std::to_string(of_device);
}
inline std::string host_wait_for(int stream) {
  return "the host of device 0 has to wait for stream " + std::to_string(stream) + " of device 0";
}
inline std::string record_of(int stream) {
  return "record_stream(stream " + std::to_string(stream) + " of device 0) before the release";
}

// ---- what schedules are made of

inline constexpr int64_t kNumel = 256;

inline at::Tensor filled(double value, int index = 0, int64_t numel = kNumel) {
  return torch::full({numel}, value, torch::TensorOptions().device(device(index)));
}
inline at::Tensor pinned(double value) {
  return torch::full({kNumel}, value, torch::TensorOptions().pinned_memory(true));
}
inline Range bytes_of(const at::Tensor& tensor, bool write) {
  return {tensor.const_data_ptr(), tensor.nbytes(), write};
}
inline void host_reads(const char* what, const at::Tensor& tensor) {
  host_access(what, bytes_of(tensor, false));
}
inline void host_writes(const char* what, const at::Tensor& tensor) {
  host_access(what, bytes_of(tensor, true));
}

inline c10::Event record(const c10::Stream& on) {
  c10::Event event(c10::kPrivateUse1);
  event.record(on);
  return event;
}
inline void order(const c10::Stream& waits, const c10::Stream& after) {
  record(after).block(waits);
}
/// Enqueues what `work` does on a stream.
template <class Work>
auto on(const c10::Stream& stream, Work work) {
  const c10::StreamGuard guard(stream);
  return work();
}

/// Streams of a device, of which `main` is the current one.
struct ThreeStreams {
  explicit ThreeStreams(int index = 0)
      : main(stream(0, index)), side(stream(1, index)), third(stream(2, index)) {}
  c10::Stream main, side, third;
};

}  // namespace zero::simulated
