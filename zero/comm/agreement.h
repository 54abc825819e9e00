// If one rank fails, all ranks throw.
//
// Note [Agreement]
// A rank that cannot do its part (a full disk, a file that it cannot read) must not leave the
// others waiting in the next collective, nor may they go on without it. So the ranks tell each
// other whether they have succeeded, and either all go on or all throw. A rank that failed throws
// its own error; the others throw an error of the kind that the caller chooses, with the first
// failed rank and its message. An error of the group itself passes straight through, since nothing
// can be agreed on any more; the group tells the others.
#pragma once

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>

#include "zero/base/error.h"
#include "zero/comm/group.h"

namespace zero::comm {

/// An error that a rank throws because another rank has failed is a PeerFailure too, whatever its
/// kind. The other rank reports the error, so a program need not print this one.
class PeerFailure {
 public:
  virtual ~PeerFailure() = default;
  /// Returns the first rank that failed.
  virtual int failed_rank() const = 0;
};

template <class Kind>
class PeerFailureOf final : public Kind, public PeerFailure {
 public:
  PeerFailureOf(int rank, const std::string& message) : Kind(message), rank_(rank) {}
  int failed_rank() const override { return rank_; }

 private:
  int rank_;
};

/// A rank's failure, as the other ranks hear of it.
struct FailureElsewhere {
  int rank = 0;
  std::string message;
};

/// Tells all ranks whether this one has failed, with a byte from each rank. Rethrows `mine` if it
/// is set; otherwise returns the first failed rank, if there is one. Collective.
std::optional<FailureElsewhere> exchange_failures(Group& group, std::string_view what,
                                                  const std::exception_ptr& mine);

/// Does nothing if no rank has failed. Otherwise a rank with a failure `mine` rethrows it, and the
/// others throw a `Kind` that says "WHAT failed on rank R: ...". Collective.
template <class Kind = Error>
void share_failure(Group& group, std::string_view what, const std::exception_ptr& mine) {
  static_assert(std::is_base_of_v<Error, Kind>);
  if (const auto other = exchange_failures(group, what, mine))
    throw PeerFailureOf<Kind>(other->rank, other->message);
}

/// Runs `work` on this rank, and returns its result if it has failed on no rank; otherwise
/// throws as `share_failure` does. An error of `work` keeps its type; a CommError is thrown at
/// once. Collective.
template <class Kind = Error, class Work>
std::invoke_result_t<const Work&> agree(Group& group, std::string_view what, const Work& work) {
  using Result = std::invoke_result_t<const Work&>;
  constexpr bool kReturns = !std::is_void_v<Result>;
  std::conditional_t<kReturns, std::optional<Result>, std::monostate> result;
  std::exception_ptr mine;
  try {
    if constexpr (kReturns) {
      result.emplace(work());
    } else {
      work();
    }
  } catch (const CommError&) {
    throw;
  } catch (...) {
    mine = std::current_exception();
  }
  share_failure<Kind>(group, what, mine);
  if constexpr (kReturns) return std::move(*result);
}

/// Runs `work` on rank 0 alone; throws as `agree` does. Collective.
template <class Kind = Error, class Work>
void agree_on_rank_zero(Group& group, std::string_view what, const Work& work) {
  agree<Kind>(group, what, [&] {
    if (group.rank() == 0) work();
  });
}

/// Returns the exception's message, without a stack trace.
std::string message_of(const std::exception_ptr& error);

}  // namespace zero::comm
