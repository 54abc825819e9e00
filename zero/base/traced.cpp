#include "zero/base/traced.h"

namespace zero {
namespace {

thread_local int scopes_traced_as_host = 0;

}  // namespace

TracedAsHost::TracedAsHost() { ++scopes_traced_as_host; }
TracedAsHost::~TracedAsHost() { --scopes_traced_as_host; }

bool TracedAsHost::active() { return scopes_traced_as_host > 0; }

}  // namespace zero
