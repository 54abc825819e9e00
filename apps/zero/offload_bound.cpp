#include "apps/zero/offload_bound.h"

#include <algorithm>
#include <string>

#include "zero/comm/gather_records.h"
#include "zero/device/copy_speed.h"
#include "zero/optim/update_speed.h"

namespace zero::app::benchmarks {

Json OffloadSpeeds::json() const {
  return {{"products_flop_per_s", products},
          {"down_bytes_per_s", down},
          {"up_bytes_per_s", up},
          {"update_bytes_per_s", update}};
}

OffloadSpeeds measure_offload(comm::Group& ranks, const Optimizer& optimizer,
                              at::ScalarType parameters, double products) {
  ranks.barrier("measuring copies between device and host");
  const auto copies = best_copy_speed(ranks.device());
  ranks.barrier("measuring updates on the host");
  const OffloadSpeeds mine{.products = products,
                           .down = copies.down,
                           .up = copies.up,
                           .update = optim::best_update_speed(optimizer, parameters)};
  const auto all = comm::gather_records(ranks, mine, "speeds");
  const auto slowest = [&](double OffloadSpeeds::*speed) {
    return std::ranges::min(all, {}, speed).*speed;
  };
  return {.products = slowest(&OffloadSpeeds::products),
          .down = slowest(&OffloadSpeeds::down),
          .up = slowest(&OffloadSpeeds::up),
          .update = slowest(&OffloadSpeeds::update)};
}

OffloadBound::OffloadBound(const OffloadWork& work, const OffloadSpeeds& speeds)
    : resources{{{"products", work.flops, speeds.products},
                 {"to the host", work.down, speeds.down},
                 {"to the device", work.up, speeds.up},
                 {"updates on the host", work.update, speeds.update}}} {}

const OffloadBound::Resource& OffloadBound::binds() const {
  return *std::ranges::max_element(resources, {}, &Resource::seconds);
}

Json OffloadBound::json() const {
  Json each = Json::object();
  for (const auto& resource : resources) {
    each[std::string(resource.name)] = {{"amount", resource.amount},
                                        {"ms", 1e3 * resource.seconds()}};
  }
  return {{"binds", binds().name}, {"ms", 1e3 * binds().seconds()}, {"resources", each}};
}

}  // namespace zero::app::benchmarks
