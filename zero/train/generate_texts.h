// Continues many texts on all ranks.
//
// Note [Many texts]
// Each rank continues up to `batch` texts at a time, each with a cache of its own. After each token
// the ranks exchange what they have drawn, 8 bytes for each place of a batch. So all of them know
// all texts and agree, without another word, on what comes next: where a text has ended, the next
// prompt goes to the rank with the fewest texts (of several the first), until no prompt is left.
// Texts end at different times, but at stage 3 ranks gather together, so all of them pass as many
// texts through the model as the rank that has the most. A rank that has fewer passes a single
// token for each that is missing, and nobody looks at its logits.
//
// Each text passes the model by itself, and text i is drawn with the seed + i. So a text depends
// neither on the other texts nor on the stage, and on the number of ranks only as far as they have
// as many threads each: a matrix product on another number of threads may add in another order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "zero/engine/engine.h"
#include "zero/models/language/generate.h"
#include "zero/models/language/language_model.h"

namespace zero::train {

struct GenerateTextsOptions {
  /// Says how each text is continued. Its `seed` is that of the first text; its `stop` may answer
  /// differently on the ranks, of which one ends all; its `on_token` is not called.
  GenerateOptions each{};
  int64_t batch = 8;  ///< texts that a rank continues at a time
  // They are called on every rank, and must not throw.
  std::function<void(size_t text, int64_t token)> on_token{};  ///< told each token of any text
  /// Told the tokens of each text that has ended, in the order of the prompts.
  std::function<void(size_t text, const std::vector<int64_t>& tokens)> on_text{};
};

/// Continues `prompts`, the same on every rank, with the model of `engine` and returns, on every
/// rank, the new tokens of each: Note [Many texts]. Ranks may have none. What `stop` has cut off
/// ends where it was. Collective. Throws ConfigError for an empty prompt, which it names by its
/// number, or options out of range, or that differ between ranks; on every rank zero::Error when a
/// logit is NaN or infinite upwards on one.
std::vector<std::vector<int64_t>> generate_texts(Engine& engine, LanguageModel& model,
                                                 const std::vector<std::vector<int64_t>>& prompts,
                                                 const GenerateTextsOptions& options);

}  // namespace zero::train
