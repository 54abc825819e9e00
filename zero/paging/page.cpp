#include "zero/paging/page.h"

#include <string>
#include <utility>

namespace zero::paging {

namespace {

void page_tag(void*) {}

// LibTorch can arm a storage but has no public way to disarm it, nor to add a dispatch key.
// Explicit instantiation may name private members; a protected one is reached through a derived
// class.
template <class Tag, auto Member>
struct Reveal {
  friend auto member(Tag) { return Member; }
};
struct ThrowFlag {
  friend auto member(ThrowFlag);
};
template struct Reveal<ThrowFlag, &c10::StorageImpl::throw_on_immutable_data_ptr_>;

struct KeySet : c10::TensorImpl {
  static constexpr auto member() { return &KeySet::key_set_; }
};

void point(c10::StorageImpl& storage, void* data, Page* page, bool armed) {
  storage.*member(ThrowFlag{}) = armed;
  // Without a swap through set_data: the version counter stays, and with it the validity of tensors
  // saved for backward.
  storage.set_data_ptr_noswap(
      c10::DataPtr(data, page, page == nullptr ? nullptr : &page_tag, c10::kCPU));
}

}  // namespace

Page* page_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto& data = tensor.unsafeGetTensorImpl()
                         ->unsafe_storage()
                         .unsafeGetStorageImpl()
                         ->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &page_tag ? static_cast<Page*>(data.get_context()) : nullptr;
}

void tag(const at::Tensor& parameter) {
  auto& keys = parameter.unsafeGetTensorImpl()->*KeySet::member();
  keys = keys.add(kPagedKey);
}

void untag(const at::Tensor& parameter) {
  auto& keys = parameter.unsafeGetTensorImpl()->*KeySet::member();
  keys = keys.remove(kPagedKey);
}

void set_absent_message(c10::StorageImpl& storage, std::string message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(message));
}

void show(Page& page, void* unit_data) {
  point(*page.storage, static_cast<char*>(unit_data) + page.byte_offset, &page, false);
}

void hide(Page& page) { point(*page.storage, nullptr, &page, true); }

void orphan(c10::StorageImpl& storage, std::string message) {
  set_absent_message(storage, std::move(message));
  point(storage, nullptr, nullptr, true);
}

}  // namespace zero::paging
