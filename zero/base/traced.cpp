#include "zero/base/traced.h"

#include <utility>

namespace zero {
namespace {

thread_local std::optional<at::DeviceType> traced_as;

}  // namespace

TracedAs::TracedAs(at::DeviceType device) : before_(std::exchange(traced_as, device)) {}
TracedAs::~TracedAs() { traced_as = before_; }

std::optional<at::DeviceType> TracedAs::device() { return traced_as; }

}  // namespace zero
