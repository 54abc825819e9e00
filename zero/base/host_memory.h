// Host memory for states and staging: page-aligned, huge pages where they help, charged to a
// ledger.
//
// Note [Colours]
// The same offset in several huge pages is the same bank of the memory's chips and the same set of
// the caches, so a loop over arrays that all begin on a huge page's border waits for one access
// after the other. So arrays that one loop passes get different colours, each of which begins some
// pages further from the border.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// Returns a zero-filled 1-D CPU tensor of `numel` elements, charged to `category` as long as its
/// storage lives. It is aligned to a page; from 2 MiB on it lies on advised huge pages, and begins
/// `colour`, a small number, from a border (Note [Colours]). Throws OutOfMemory naming the bytes.
at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category, int64_t colour = 0);

/// Returns an uninitialised 1-D CPU tensor of `numel` elements from the host allocator, whose
/// memory serves activations before and afterwards. It is charged to `category`, and not to
/// activations, as long as its storage lives. At least 64-byte aligned. Throws OutOfMemory.
at::Tensor host_empty(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category);

/// Returns `bytes` uninitialised bytes as `host_empty` does, on a page's border and with room for
/// whole pages.
at::Tensor host_pages(int64_t bytes, std::shared_ptr<Ledger> ledger, Category category);

/// Returns the elements [begin, begin + numel) of the contiguous `array`, whose storage only the
/// caller uses, and which is useless afterwards. If its memory is the host allocator's, they stay
/// in their place and all other pages are given back; else they are copied. Charged as in
/// `host_empty`.
at::Tensor host_part(at::Tensor array, int64_t begin, int64_t numel, std::shared_ptr<Ledger> ledger,
                     Category category);

}  // namespace zero
