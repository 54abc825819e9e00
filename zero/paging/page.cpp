#include "zero/paging/page.h"

#include <string>
#include <utility>

namespace zero::paging {

namespace {

void page_tag(void*) {}

// LibTorch can arm a storage, but has no public way to disarm it or to add a dispatch key. An
// explicit instantiation may name private members. A protected member is reached through a derived
// class.
template <class Tag, auto Member>
struct Reveal {
  friend auto member(Tag) { return Member; }
};
struct ThrowFlag {
  friend auto member(ThrowFlag);
};
template struct Reveal<ThrowFlag, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
struct CheckFlag {
  friend auto member(CheckFlag);
};
template struct Reveal<CheckFlag, &c10::StorageImpl::has_mutable_data_ptr_check_>;
struct Held {
  friend auto member(Held);
};
template struct Reveal<Held, &c10::DataPtr::ptr_>;
struct Address {
  friend auto member(Address);
};
template struct Reveal<Address, &c10::detail::UniqueVoidPtr::data_>;

struct KeySet : c10::TensorImpl {
  static constexpr auto member() { return &KeySet::key_set_; }
};

// Changes only the address, since other threads look at the page meanwhile (`page_of`). It does not
// swap through set_data, so the version counter stays, and tensors saved for backward stay valid.
void point(c10::StorageImpl& storage, void* data, bool armed) {
  storage.*member(ThrowFlag{}) = armed;
  storage.*member(CheckFlag{}) = armed;  // makes LibTorch check `ThrowFlag`
  storage._mutable_data_ptr_no_checks().*member(Held{}).*member(Address{}) = data;
}

void own(c10::StorageImpl& storage, Page* page) {
  storage.*member(ThrowFlag{}) = true;
  storage.set_data_ptr_noswap(
      c10::DataPtr(nullptr, page, page == nullptr ? nullptr : &page_tag, storage.device()));
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
  point(*page.storage, static_cast<char*>(unit_data) + page.byte_offset, false);
}

void take_over(Page& page) { own(*page.storage, &page); }

void hide(Page& page) { point(*page.storage, nullptr, true); }

void orphan(c10::StorageImpl& storage, std::string message) {
  set_absent_message(storage, std::move(message));
  own(storage, nullptr);
}

}  // namespace zero::paging
