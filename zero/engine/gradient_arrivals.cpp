#include "zero/engine/gradient_arrivals.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

namespace zero {

GradientArrivals::GradientArrivals(const partition::Layout& layout,
                                   std::vector<at::Tensor> parameters)
    : layout_(layout),
      parameters_(std::move(parameters)),
      in_array_(parameters_.size(), 0),
      awaited_(parameters_.size(), 0),
      places_(parameters_.size(), WeakTensor(at::Tensor().getIntrusivePtr())),
      counts_(static_cast<size_t>(layout.unit_count()), 0) {}

at::Tensor GradientArrivals::remove_gradient(const at::Tensor& variable) {
  auto gradient = variable.grad();
  if (!gradient.defined()) return gradient;
  variable.mutable_grad() = at::Tensor();
  const at::NoGradGuard no_grad;
  if (gradient.layout() != at::kStrided) gradient = gradient.to_dense();
  return gradient;
}

void GradientArrivals::begin_pass() {
  in_pass_ = true;
  std::ranges::fill(awaited_, uint8_t{0});
}

bool GradientArrivals::await(int64_t parameter) {
  const auto p = static_cast<size_t>(parameter);
  return in_pass_ && in_array_[p] == 0 && std::exchange(awaited_[p], uint8_t{1}) == 0;
}

at::Tensor GradientArrivals::place(int64_t parameter, const at::Tensor& shape,
                                   const at::Tensor& array) const {
  return array.as_strided(shape.sizes(), shape.strides(),
                          array.storage_offset() + layout_.segment_of(parameter).offset);
}

at::Tensor GradientArrivals::give_place(int64_t parameter, const at::Tensor& array) {
  const auto p = static_cast<size_t>(parameter);
  auto given = place(parameter, parameters_[p], array);
  places_[p] = WeakTensor(given.getIntrusivePtr());
  return given;
}

bool GradientArrivals::awaits(int64_t unit) const {
  return std::ranges::any_of(layout_.unit(unit).segments, [&](const auto& segment) {
    return awaited_[static_cast<size_t>(segment.parameter)] != 0;
  });
}

void GradientArrivals::arrive(int64_t parameter, const at::Tensor& gradient) {
  const auto p = static_cast<size_t>(parameter);
  if (std::exchange(awaited_[p], uint8_t{0}) == 0) return;
  const at::Tensor on_its_way(places_[p].lock());
  if (on_its_way.defined() && on_its_way.const_data_ptr() != gradient.const_data_ptr())
    on_its_way.set_data(on_its_way.clone(at::MemoryFormat::Preserve));
}

void GradientArrivals::collect(int64_t parameter, const at::Tensor& variable,
                               const at::Tensor& gradient, const at::Tensor& array) const {
  auto to = place(parameter, variable, array);
  if (in_array_[static_cast<size_t>(parameter)] != 0) {
    to.add_(gradient);
  } else if (to.const_data_ptr() != gradient.const_data_ptr()) {
    to.copy_(gradient);
  }
}

bool GradientArrivals::note_in_array(int64_t parameter) {
  return std::exchange(in_array_[static_cast<size_t>(parameter)], uint8_t{1}) == 0;
}

void GradientArrivals::close(int64_t unit, const at::Tensor& array) {
  int64_t end = 0;
  const auto zero_until = [&](int64_t begin) {
    if (begin > end) array.narrow(0, end, begin - end).zero_();
  };
  for (const auto& segment : layout_.unit(unit).segments) {
    if (std::exchange(in_array_[static_cast<size_t>(segment.parameter)], uint8_t{0}) == 0) continue;
    zero_until(segment.offset);
    end = segment.range().end;
  }
  zero_until(layout_.unit(unit).numel);
}

bool GradientArrivals::count_arrival(int64_t unit) {
  ++counts_[static_cast<size_t>(unit)];
  return all_arrived(unit);
}

bool GradientArrivals::all_arrived(int64_t unit) const {
  return counts_[static_cast<size_t>(unit)] >=
         static_cast<int64_t>(layout_.unit(unit).segments.size());
}

void GradientArrivals::restart_counts() { std::ranges::fill(counts_, int64_t{0}); }

void GradientArrivals::clear() {
  std::ranges::fill(in_array_, uint8_t{0});
  restart_counts();
}

}  // namespace zero
