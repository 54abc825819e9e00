#include "zero/base/deferred_graph.h"

namespace zero {

namespace {

thread_local int depth = 0;

}  // namespace

DeferredGraph::DeferredGraph() { ++depth; }
DeferredGraph::~DeferredGraph() { --depth; }
bool DeferredGraph::active() { return depth > 0; }

}  // namespace zero
