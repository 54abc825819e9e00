// The documents of token files, with a label each.
//
// Note [Labels of documents]
// Beside NAME.bin and NAME.marks.bin there is NAME.labels.bin: the label of each document as a
// little-endian number of 32 bits, in the order of the documents. Their names are in meta.json.
#pragma once

#include <cstdint>
#include <vector>

#include "zero/data/dataset.h"

namespace zero {

class LabelledTexts {
 public:
  struct Text {
    std::vector<int64_t> tokens;
    int64_t second = 0;  ///< where the tokens of the second text of a pair begin; else their number
    int64_t label = 0;
  };

  /// Finds the documents that begin in `range`, in the marks of one file. DataError for tokens
  /// without marks or labels, labels that are not as many as the documents, and for a token or a
  /// label that is not below `vocab_size` or `classes`, when it is read.
  LabelledTexts(TokenRange range, int64_t vocab_size, int64_t classes);

  int64_t size() const { return static_cast<int64_t>(labels_.size()); }
  /// Reads text `index`, shortened to `most` tokens: the longer part loses tokens before its last
  /// one, until both fit.
  Text read(int64_t index, int64_t most) const;
  /// The number of tokens that `read` gives.
  int64_t tokens(int64_t index, int64_t most) const;

 private:
  TokenRange range_;
  int64_t vocab_size_;
  std::vector<int64_t> begins_;  // and the end of the last
  std::vector<int32_t> labels_;
};

}  // namespace zero
