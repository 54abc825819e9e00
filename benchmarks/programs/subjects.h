// The subjects of `zero_bench`, which measures what developers of libzero look at.
#pragma once

#include <vector>

#include "apps/zero/bench.h"

namespace zero::app::benchmarks {

int optimizer(const Arguments& arguments);
int pager(const Arguments& arguments);
int tokenizer(const Arguments& arguments);

/// Times AdamW's update of whole models in bf16 with fp32 master weights, and prints each row
/// beside the published seconds. Throws OutOfMemory for a size that does not fit, before it
/// allocates anything.
Json whole_models(const std::vector<int64_t>& sizes, const std::vector<int>& threads, int rounds);

}  // namespace zero::app::benchmarks
