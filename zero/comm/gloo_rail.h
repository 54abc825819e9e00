// Rails over the Gloo that LibTorch contains.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// Returns true if libzero was built with a LibTorch whose Gloo it can use (cmake/Gloo.cmake).
/// Otherwise gloo_rail throws a CommError that names the LibTorch.
bool has_gloo_rails();

/// Makes the end on `host` of a rail that joins `hosts` hosts by Gloo: it has one connection for
/// each channel and other host, and a thread for each channel that moves the bytes. Collective over
/// the hosts, which meet in `store`; that must be the rail's own (a PrefixStore). This end listens
/// at `address` (rail_address). If that is a loopback address and the peers' are not, the end takes
/// the address by which it reaches them: on Debian a host's own name means loopback to itself
/// alone.
///
/// Nothing is encrypted, so GLOO_DEVICE_TRANSPORT=TCP_TLS is refused: see Note [No encryption by
/// Gloo].
///
/// Throws CommError naming the hosts that do not come within the timeout, or the address that
/// cannot be used, and ConfigError for variables.
std::unique_ptr<Rail> gloo_rail(c10::intrusive_ptr<c10d::Store> store, int host, int hosts,
                                const std::string& address, PieceOptions options = {});

}  // namespace zero::comm
