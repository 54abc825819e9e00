#include "zero/comm/flight.h"

#include <string>
#include <utility>

namespace zero::comm {

struct Flight::Call {
  std::shared_ptr<Timeline> timeline;
  std::shared_ptr<CallLog> log;
  CallTime time;
  std::string label;
  int64_t bytes = 0;
  int64_t begin = 0;
};

void Flight::Delete::operator()(Call* call) const noexcept { delete call; }

void Flight::begin(const Accounts& accounts, const CallTime& call, int64_t bytes) {
  call_.reset(new Call{.timeline = accounts.timeline,
                       .log = accounts.calls,
                       .time = call,
                       .label = std::string(call.label),
                       .bytes = bytes,
                       .begin = Timeline::now()});
}

Timeline& Flight::timeline() const { return *call_->timeline; }
std::string_view Flight::label() const { return call_->label; }

namespace {

bool reduces(Collective collective) {
  return collective == Collective::reduce_scatter || collective == Collective::all_reduce;
}

}  // namespace

Activity Flight::waiting() const {
  const auto collective = call_->time.collective;
  if (collective == Collective::control) return Activity::wait_control;
  return reduces(collective) ? Activity::wait_reduce : Activity::wait_gather;
}

void Flight::end(int64_t at) {
  const auto call = std::move(call_);
  if (!call) return;
  const auto collective = call->time.collective;
  const auto activity = collective == Collective::control ? Activity::control
                        : reduces(collective)             ? Activity::reduce
                                                          : Activity::gather;
  call->timeline->add(activity, call->label, call->begin, at, call->bytes);
  call->time.label = call->label;
  call->time.nanoseconds = at - call->begin;
  call->log->add(call->time);
}

void end_flight(Flight& flight, const c10d::Work& work) {
  if (!flight) return;
  const auto* knows = dynamic_cast<const KnowsItsEnd*>(&work);
  flight.end(knows != nullptr ? knows->ended() : Timeline::now());
}

}  // namespace zero::comm
