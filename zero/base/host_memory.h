// Host memory for states and staging. It is aligned to pages, lies on huge pages where they help,
// and is charged to a ledger.
//
// Note [Colours]
// The same offset in several huge pages means the same bank of the memory's chips and the same set
// of the caches. So a loop over arrays that all begin at a huge page's border waits for one access
// after the other. Arrays that one loop passes over therefore get different colours: each colour
// begins some pages further from the border.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "zero/base/ledger.h"

namespace zero {

/// Returns a zero-filled 1-D CPU tensor of `numel` elements, charged to `category` as long as its
/// storage lives. It is aligned to a page. From 2 MiB on it lies on advised huge pages, and its
/// distance from a border is given by `colour`, a small number (Note [Colours]). Throws
/// OutOfMemory, which names the bytes.
at::Tensor host_zeros(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category, int64_t colour = 0);

/// Returns an uninitialised 1-D CPU tensor of `numel` elements from the host allocator, whose
/// memory serves activations before and afterwards. As long as its storage lives it is charged to
/// `category`, and not to activations. It is aligned to at least 64 bytes. Throws OutOfMemory.
at::Tensor host_empty(int64_t numel, at::ScalarType dtype, std::shared_ptr<Ledger> ledger,
                      Category category);

/// Returns `bytes` uninitialised bytes as `host_empty` does. They begin on a page, and there is
/// room for whole pages.
at::Tensor host_pages(int64_t bytes, std::shared_ptr<Ledger> ledger, Category category);

/// Returns the elements [begin, begin + numel) of the contiguous `array`. Only the caller may use
/// the array's storage, and it is useless afterwards. If the memory belongs to the host allocator,
/// the elements stay in their place and all other pages are given back; otherwise they are copied.
/// The result is charged as in `host_empty`.
at::Tensor host_part(at::Tensor array, int64_t begin, int64_t numel, std::shared_ptr<Ledger> ledger,
                     Category category);

}  // namespace zero
