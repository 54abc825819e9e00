#include "zero/device/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

namespace zero {

namespace {

c10::Stream stream_of_thread(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (!is_asynchronous(device)) return std::nullopt;
  return stream_of_thread(device);
}

std::optional<c10::Stream> side_stream(c10::Device device) {
  if (!is_asynchronous(device)) return std::nullopt;
  return c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
}

void wait_for_device(c10::Device device) {
  if (is_asynchronous(device))
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

void StreamMark::record(c10::Device device) {
  if (const auto stream = current_stream(device)) record(*stream);
}

void StreamMark::record(const c10::Stream& stream) {
  if (!event_) event_.emplace(stream.device_type());
  event_->record(stream);
  stream_ = stream;
}

void StreamMark::wait() const {
  if (!stream_) return;
  const auto waits = stream_of_thread(stream_->device());
  if (waits != *stream_) event_->block(waits);  // a stream is in order with itself
}

void StreamMark::wait_on_host() const {
  if (stream_) event_->synchronize();
}

namespace {

// The scope marks the stream that was current, and from then on the thread's stream is `side`.
std::optional<c10::Stream> marked(const std::optional<c10::Stream>& side, StreamMark& mark) {
  if (side) mark.record(side->device());
  return side;
}

}  // namespace

SideScope::SideScope(const std::optional<c10::Stream>& side, StreamMark& mark)
    : on_(marked(side, mark)) {
  if (side) mark.wait();
}

void wait_for(const std::optional<c10::Stream>& side, StreamMark& mark) {
  if (!side || current_stream(side->device()) == side) return;
  mark.record(*side);
  mark.wait();
}

void StreamMarks::record(c10::Device device) {
  if (const auto stream = current_stream(device)) record(*stream);
}

void StreamMarks::record(const c10::Stream& stream) {
  auto* const found = std::find_if(marks_.begin(), marks_.end(),
                                   [&](const StreamMark& mark) { return mark.stream() == stream; });
  (found != marks_.end() ? *found : marks_.emplace_back()).record(stream);
}

void StreamMarks::wait() {
  for (const auto& mark : marks_) mark.wait();
  marks_.clear();
}

}  // namespace zero
