// The error of a rank that others are told of.
#pragma once

#include <string>
#include <utility>

#include "zero/base/error.h"

namespace zero::comm {

/// A CommError that began with the job's rank `origin`. `cause()` is the message without this
/// rank's own action, so that others can pass it on.
class PeerError : public CommError {
 public:
  PeerError(int origin, std::string cause, const std::string& message)
      : CommError(message), origin_(origin), cause_(std::move(cause)) {}
  int origin() const { return origin_; }
  const std::string& cause() const { return cause_; }

 private:
  int origin_;
  std::string cause_;
};

}  // namespace zero::comm
