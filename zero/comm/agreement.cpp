#include "zero/comm/agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>

#include "zero/comm/fixed_text.h"
#include "zero/comm/gather_records.h"
#include "zero/comm/peer_error.h"

namespace zero::comm {

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

namespace {

using Message = FixedText<1024>;

// Returns the message of the rank `failed`. Collective; a rank may be leaving already.
std::string message_of_rank(Group& group, int failed, const Message& mine, std::string_view what) {
  try {
    const auto messages = gather_records(group, mine, what);
    return std::string(messages[static_cast<size_t>(failed)].view());
  } catch (const CommError&) {
    return "its own message says why.";
  }
}

}  // namespace

std::optional<FailureElsewhere> exchange_failures(Group& group, std::string_view what,
                                                  const std::exception_ptr& mine) {
  if (group.size() > 1) {
    std::optional<int> failed;
    try {
      failed = first_failure(group, mine != nullptr, what);
    } catch (const PeerError& known) {
      // This rank's own failure may have caused the peer's end: a folder that is gone, for example.
      if (mine && known.origin() == group.number()) std::rethrow_exception(mine);
      throw;
    } catch (const CommError&) {
      if (mine) std::rethrow_exception(mine);  // it came first
      throw;
    }
    if (failed) {  // messages follow only now: if all is well a byte is enough
      const auto said =
          message_of_rank(group, *failed, Message(mine ? message_of(mine) : std::string()), what);
      if (!mine) {
        return FailureElsewhere{*failed,
                                fmt::format("{} failed on rank {}: {}", what, *failed, said)};
      }
    }
  }
  if (mine) std::rethrow_exception(mine);
  return std::nullopt;
}

}  // namespace zero::comm
