#include "tests/device/copies.h"

#include "tests/device/effects.h"
#include "tests/device/machine.h"
#include "tests/device/operators.h"

namespace zero::simulated {

namespace {

void copy_up(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto& machine = Machine::instance();
  const Actor stream = current_actor(destination.device().index());
  std::vector<Range> ranges{range_of(destination, true)};
  at::Tensor from = source;
  if (source.is_pinned()) {
    ranges.push_back(range_of(source, false));
  } else {
    from = source.clone();
  }
  machine.launch(stream, "copy to the device", ranges,
                 [from, to = shown_to_tasks(destination)] { to.copy_(from); });
  if (!non_blocking) machine.host_wait_for_stream(stream, "copy to the device", false);
}

void copy_down(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  auto& machine = Machine::instance();
  const Actor stream = current_actor(source.device().index());
  machine.launch(stream, "copy to the host", {range_of(source, false), range_of(destination, true)},
                 [from = shown_to_tasks(source), destination] { destination.copy_(from); });
  if (!non_blocking || !destination.is_pinned()) {
    machine.host_wait_for_stream(stream, "copy to the host", false);
    // Ordinary memory goes back to the C library, and then to any rank of the process.
    const auto copied = range_of(destination, true);
    if (!destination.is_pinned()) machine.forget(copied.data, copied.bytes);
  }
}

void copy_on_device(const at::Tensor& source, const at::Tensor& destination) {
  auto& machine = Machine::instance();
  const Actor stream = current_actor(source.device().index());
  const Actor other = current_actor(destination.device().index());
  machine.order(stream, machine.record(other));
  machine.launch(
      stream, "copy", {range_of(source, false), range_of(destination, true)},
      [from = shown_to_tasks(source), to = shown_to_tasks(destination)] { to.copy_(from); });
  machine.order(other, machine.record(stream));
}

}  // namespace

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) return destination;
  const auto expanded = source.expand(destination.sizes());
  if (on_device(source) && on_device(destination)) {
    copy_on_device(expanded, destination);
  } else if (on_device(destination)) {
    copy_up(expanded, destination, non_blocking);
  } else {
    copy_down(expanded, destination, non_blocking);
  }
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

}  // namespace zero::simulated
