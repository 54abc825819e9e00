#include "zero/base/autocast.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include <algorithm>

#include "zero/base/error.h"
#include "zero/base/traced.h"

namespace zero {

namespace {

void set(const Autocast::State& state) {
  for (size_t i = 0; i < Autocast::State::kDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(Autocast::State::kDevices[i], state.enabled[i]);
    at::autocast::set_autocast_dtype(Autocast::State::kDevices[i], state.dtype[i]);
  }
}

// In a trace tensors on meta are those of the traced device.
at::DeviceType device_of(at::DeviceType device) {
  return device == at::kMeta ? TracedAs::device().value_or(device) : device;
}

bool casts_on(at::DeviceType device) {
  const auto& devices = Autocast::State::kDevices;
  return std::find(devices.begin(), devices.end(), device) != devices.end();
}

Autocast::State state_of(std::optional<at::ScalarType> dtype, at::DeviceType device) {
  auto state = Autocast::State::current();
  if (dtype && *dtype != at::kBFloat16 && *dtype != at::kHalf) {
    throw Error(fmt::format("Autocast was given the dtype {}; it casts to BFloat16 or Half.",
                            c10::toString(*dtype)));
  }
  const auto& devices = Autocast::State::kDevices;
  device = device_of(device);
  if (!dtype && !casts_on(device)) return state;
  if (!casts_on(device)) {
    throw Error(fmt::format("Autocast was given the device {}; it casts on CPU and CUDA.",
                            c10::DeviceTypeName(device)));
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    if (devices[i] != device) continue;
    state.enabled[i] = dtype.has_value();
    if (dtype) state.dtype[i] = *dtype;
  }
  return state;
}

}  // namespace

Autocast::State Autocast::State::current() {
  State state;
  for (size_t i = 0; i < kDevices.size(); ++i) {
    state.enabled[i] = at::autocast::is_autocast_enabled(kDevices[i]);
    state.dtype[i] = at::autocast::get_autocast_dtype(kDevices[i]);
  }
  return state;
}

Autocast::Autocast(std::optional<at::ScalarType> dtype, at::DeviceType device)
    : Autocast(state_of(dtype, device)) {}

Autocast::Autocast(const State& state)
    : before_(State::current()), cache_(at::autocast::is_autocast_cache_enabled()) {
  set(state);
  at::autocast::set_autocast_cache_enabled(false);
}

Autocast::~Autocast() {
  set(before_);
  at::autocast::set_autocast_cache_enabled(cache_);
}

std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor) {
  const auto device = device_of(tensor.device().type());
  const auto dtype = tensor.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return std::nullopt;
  if (!casts_on(device) || !at::autocast::is_autocast_enabled(device)) return std::nullopt;
  return at::autocast::get_autocast_dtype(device);
}

}  // namespace zero
