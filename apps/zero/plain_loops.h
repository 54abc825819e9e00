// Loops that only stream memory: what a machine can do, beside which the optimizers are measured.
#pragma once

#include <cstdint>

namespace zero::app::benchmarks {

// All work on elements [begin, end), on the widest instruction set of this machine.

/// a = b + 3 c, as STREAM's triad.
void triad(float* a, const float* b, const float* c, int64_t begin, int64_t end);

/// Computes the triad with stores that go past the caches, so that the lines of `a` are not read
/// first.
void triad_past_caches(float* a, const float* b, const float* c, int64_t begin, int64_t end);

/// Reads alone: the exclusive or of all.
uint64_t read(const uint64_t* a, int64_t begin, int64_t end);

/// AdamW's reads and writes with three additions.
void stream(float* p, float* m, float* v, const float* g, int64_t begin, int64_t end);

/// Reads and writes as an optimizer with one state does.
void stream_one(float* p, float* m, const float* g, int64_t begin, int64_t end);

/// Does so with a 16-bit gradient and a 16-bit copy of the weights.
void stream16_one(float* p, float* m, const uint16_t* g, uint16_t* low, int64_t begin, int64_t end);

/// AdamW's with a 16-bit gradient and a 16-bit copy of the weights.
void stream16(float* p, float* m, float* v, const uint16_t* g, uint16_t* low, int64_t begin,
              int64_t end);

}  // namespace zero::app::benchmarks
