// The boxed fallback of the paged dispatch key. See Note [Paging] in page.h.
//
// Note [Views need no bytes]
// If an argument's schema says that the result is a view of it (alias information, no write), the
// operator needs only its sizes and strides: `w.t()` of an absent parameter stays free. Operators
// that may either view or copy (reshape, contiguous, to) are compositions. Their inner operators
// come through here again, because the key is excluded for the outer call alone. When an operator
// does read a parameter, its parameters are pinned, so the key is excluded for everything inside
// it.
#include <ATen/RedispatchFunctions.h>
#include <ATen/ceil_div.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>

#include "zero/base/deferred_graph.h"
#include "zero/base/row_embedding.h"
#include "zero/base/weight_use.h"
#include "zero/paging/page.h"
#include "zero/paging/pager.h"

namespace zero::paging {

namespace {

// A parameter among an operator's arguments.
struct Use {
  Page* page;
  bool written;
};
using Uses = c10::SmallVector<Use, 4>;
using Pins = c10::SmallVector<Pager::Pin, 1>;

void find(const at::Tensor& tensor, bool written, Uses& uses) {
  if (Page* page = page_of(tensor)) uses.push_back({page, written});
}

Uses find_uses(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  Uses uses;
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (alias != nullptr && !written) continue;
    const auto& value = values[i];
    if (value.isTensor()) {
      find(value.toTensor(), written, uses);
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isNone()) continue;  // Tensor?[]
        if (!element.isTensor()) break;
        find(element.toTensor(), written, uses);
      }
    }
  }
  return uses;
}

bool differentiable() {
  return c10::GradMode::is_enabled() || DeferredGraph::active() ||
         torch::autograd::get_current_graph_task_id() != -1;
}

// Makes one pin for each pager; there is almost always one.
Pins pin(const Uses& uses) {
  Pins pins;
  for (size_t first = 0; first < uses.size(); ++first) {
    auto* pager = uses[first].page->pager;
    const auto* done = uses.begin() + first;
    if (std::any_of(uses.begin(), done, [&](const Use& use) { return use.page->pager == pager; }))
      continue;
    c10::SmallVector<int64_t, 4> units;
    for (const auto& use : uses) {
      if (use.page->pager == pager &&
          std::find(units.begin(), units.end(), use.page->unit) == units.end())
        units.push_back(use.page->unit);
    }
    // Ranks gather in one order. Libraries take the same arguments in several, and which of them
    // multiplies depends on the sizes of a rank's batch.
    std::sort(units.begin(), units.end());
    pins.push_back(pager->touch(units, differentiable()));
    for (const auto& use : uses) {
      if (use.page->pager == pager && use.written) pager->mark_dirty(*use.page);
    }
  }
  return pins;
}

// Returns the keys that come after the pager's.
c10::DispatchKeySet below(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
}

void page_in(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto uses = find_uses(op.schema(), *stack);
  if (uses.empty()) {
    op.redispatchBoxed(below(keys), stack);
    return;
  }
  const auto pins = pin(uses);
  const c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
  op.redispatchBoxed(below(keys), stack);
}

// Returns the whole rows of `weight`, which begins at element `offset` of its unit, in a part of
// the unit.
std::optional<WeightRows> rows_in(const UnitPart& part, const at::Tensor& weight, int64_t offset) {
  const int64_t columns = weight.size(1);
  const auto mine = partition::intersect(part.elements, {offset, offset + weight.numel()});
  const int64_t begin = at::ceil_div(mine.begin - offset, columns);
  const int64_t end = (mine.end - offset) / columns;
  if (mine.empty() || begin >= end) return {};
  const int64_t first = offset + begin * columns - part.elements.begin;
  const int64_t numel = (end - begin) * columns;
  return WeightRows{begin, part.values.narrow(0, first, numel).view({end - begin, columns})};
}

// Returns whether a tensor over a parameter's storage is a matrix that shows all of it.
bool is_whole(const at::Tensor& weight) {
  return weight.dim() == 2 && weight.numel() > 0 && weight.is_contiguous() &&
         weight.storage_offset() == 0;
}

// Does the work of zero::look_up_rows.
at::Tensor look_up_paged(const at::Tensor& weight, const at::Tensor& indices) {
  const auto* page = page_of(weight);
  if (page == nullptr || c10::impl::tls_is_dispatch_key_excluded(kPagedKey) || !is_whole(weight))
    return {};
  const auto& parameter = page->pager->parameter(*page);
  if (weight.sizes() != parameter.sizes() || weight.scalar_type() != parameter.scalar_type())
    return {};
  return page->pager->look_up(page->unit, indices, differentiable());
}

// Looks rows up in a weight that may come as rows, and whose gradient may leave as rows.
at::Tensor embedding_paged(c10::DispatchKeySet keys, const at::Tensor& weight,
                           const at::Tensor& indices, c10::SymInt padding, bool by_frequency,
                           bool sparse) {
  Uses uses;
  find(weight, false, uses);
  if (!uses.empty() && !by_frequency && !sparse && is_whole(weight)) {
    auto rows = try_row_embedding(weight, indices, padding.guard_int(__FILE__, __LINE__));
    if (rows.defined()) return rows;
  }
  const auto pins = pin(uses);
  const c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
  return at::redispatch::embedding_symint(below(keys), weight, indices, std::move(padding),
                                          by_frequency, sparse);
}

// Does the work of zero::use_weight.
void use_paged(const at::Tensor& weight, const UseRows& early, const std::function<void()>& rest) {
  const auto* page = page_of(weight);
  if (page == nullptr || c10::impl::tls_is_dispatch_key_excluded(kPagedKey)) return rest();
  const auto use = [&](const UnitPart& part) -> int64_t {
    const int64_t element = weight.element_size();
    const auto here = rows_in(part, weight, page->byte_offset / element);
    return here ? early(*here) : 0;
  };
  const auto pin = is_whole(weight) ? page->pager->touch(page->unit, differentiable(), use)
                                    : page->pager->touch(std::array{page->unit}, differentiable());
  const c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
  rest();
}

// The library serves the layers as soon as it is loaded.
[[maybe_unused]] const bool serves = (serve_weight_uses(&use_paged, &look_up_paged), true);

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&page_in>());
}

TORCH_LIBRARY_IMPL(aten, DeferredInit, library) {
  library.impl("embedding", TORCH_FN(embedding_paged));
}

}  // namespace zero::paging
