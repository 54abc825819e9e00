// Rails over the Gloo that LibTorch contains.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

#include "zero/comm/piece_rail.h"

namespace zero::comm {

/// Whether libzero was built with a LibTorch whose Gloo it can use (cmake/Gloo.cmake). Without, a
/// gloo_rail is a CommError that names the LibTorch.
bool has_gloo_rails();

/// The end on `host` of a rail that joins `hosts` hosts by Gloo: one connection for each channel
/// and other host, and a thread for each channel that moves the bytes. Collective over the hosts,
/// which meet in `store`; it must be the rail's own (a PrefixStore). `address` is where this end
/// listens (rail_address). An end on loopback whose peers are not takes the address by which it
/// reaches them: on Debian a host's own name means loopback to itself alone.
///
/// Nothing is encrypted; GLOO_DEVICE_TRANSPORT=TCP_TLS is refused, see Note [No encryption by
/// Gloo].
///
/// Throws CommError naming the hosts that do not come within the timeout, or the address that
/// cannot be used, and ConfigError for variables.
std::unique_ptr<Rail> gloo_rail(c10::intrusive_ptr<c10d::Store> store, int host, int hosts,
                                const std::string& address, PieceOptions options = {});

}  // namespace zero::comm
