// The boxed fallback of the paged dispatch key. See Note [Paging] in page.h.
//
// Note [Views need no bytes]
// An argument whose schema says that the result is a view of it (alias information, no write) is
// only looked at by its sizes and strides: `w.t()` of an absent parameter stays free. Operators
// that may either view or copy (reshape, contiguous, to) are compositions whose inner operators
// come through here again, because the key is excluded for this call alone then. When an operator
// does read a parameter, the key is excluded for everything inside it: its parameters are pinned.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "zero/paging/page.h"
#include "zero/paging/pager.h"

namespace zero::paging {

namespace {

using Pins = c10::SmallVector<Pager::Pin, 4>;

void pin(const at::Tensor& tensor, bool written, Pins& pins) {
  Page* page = page_of(tensor);
  if (page == nullptr) return;
  pins.push_back(page->pager->touch(page->unit));
  if (written) page->pager->mark_dirty(*page);
}

void pin_all(const c10::FunctionSchema& schema, const torch::jit::Stack& stack, Pins& pins) {
  const auto& arguments = schema.arguments();
  const auto values = torch::jit::last(stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    if (alias != nullptr && !written) continue;
    const auto& value = values[i];
    if (value.isTensor()) {
      pin(value.toTensor(), written, pins);
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isNone()) continue;  // Tensor?[]
        if (!element.isTensor()) break;
        pin(element.toTensor(), written, pins);
      }
    }
  }
}

void page_in(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  Pins pins;
  pin_all(op.schema(), *stack, pins);
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kPagedKey);
  if (pins.empty()) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard guard(kPagedKey);
  op.redispatchBoxed(below, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&page_in>());
}

}  // namespace zero::paging
