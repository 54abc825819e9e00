// A page ties a parameter's storage to the unit whose bytes it shows.
//
// Note [Paging]
// A parameter keeps its tensor, its sizes and its autograd identity for ever; only the bytes behind
// its storage come and go. Its TensorImpl carries the dispatch key DeferredInit, which LibTorch's
// core reserves for out-of-core uses; views inherit it. So the boxed fallback of that key
// (dispatch.cpp) runs exactly when an operator receives a parameter or a view of one, in forward,
// in backward and in recomputation. The storage's DataPtr has a Page as its context and `page_tag`
// as its deleter. The deleter marks the context as a Page, and frees nothing. An absent storage is
// armed: if anything reads its data without an operator, LibTorch's own check throws our message.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>

namespace zero::paging {

class Pager;

inline constexpr c10::DispatchKey kPagedKey = c10::DispatchKey::DeferredInit;

struct Page {
  Pager* pager = nullptr;
  int64_t parameter = 0;
  int64_t unit = 0;
  int64_t byte_offset = 0;  ///< the parameter's place in its unit
  c10::StorageImpl* storage = nullptr;
};

/// Returns the page behind a tensor's storage, or null if the tensor is no parameter of a pager.
/// Works on absent tensors too.
Page* page_of(const at::Tensor& tensor);

/// Adds the dispatch key to a parameter, or takes it away.
void tag(const at::Tensor& parameter);
void untag(const at::Tensor& parameter);

/// Sets the message that is thrown when something reads the absent storage's data. It must be
/// called once for each storage, before `take_over`.
void set_absent_message(c10::StorageImpl& storage, std::string message);
/// Begins the paging of a storage and frees its bytes. The storage is then absent and armed.
void take_over(Page& page);
/// Points the storage to its bytes in the gathered unit at `unit_data`.
void show(Page& page, void* unit_data);
/// Takes the bytes away and arms the storage.
void hide(Page& page);
/// Ends the paging of a storage for good: it is absent and armed, without a page.
void orphan(c10::StorageImpl& storage, std::string message);

}  // namespace zero::paging
