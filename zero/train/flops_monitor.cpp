#include "zero/train/monitor.h"
#include "zero/train/report_file.h"

namespace zero::train {
namespace {

class FlopsMonitor final : public Monitor {
 public:
  explicit FlopsMonitor(const std::string& file) : file_(file, "the report of FLOPs") {}

  void step(const StepReport& report) override {
    if (!report.flops) return;
    file_.clear();
    file_.write(flops_report(report.flops->step, report.flops->options));
  }

 private:
  ReportFile file_;
};

}  // namespace

std::unique_ptr<Monitor> flops_monitor(const std::string& file) {
  return std::make_unique<FlopsMonitor>(file);
}

}  // namespace zero::train
