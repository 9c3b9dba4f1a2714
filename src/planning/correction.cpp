#include "planning/correction.h"

#include <Eigen/Cholesky>
#include <algorithm>

namespace sherd::planning {
namespace {

/// Seconds of a step's kernels, exchanges and update.
Eigen::Vector3d parts_of(const engine::StepTime& time) {
  const double exchange = time.exchange + time.gather + time.reduce;
  return {std::max(0.0, time.seconds - exchange - time.update), exchange, time.update};
}

void slow_down(config::ProductRates& products, double factor) {
  products.efficiency = std::min(1.0, products.efficiency / factor);
  for (config::MeasuredProduct& product : products.measured) product.flops /= factor;
  products.attention.forward = std::min(1.0, products.attention.forward / factor);
  products.attention.backward = std::min(1.0, products.attention.backward / factor);
}

}  // namespace

Correction correction_of(std::span<const MeasuredStep> steps) {
  constexpr double pull = 0.01, least = 1e-3, most = 1e3;
  Eigen::Matrix3d normal = pull * Eigen::Matrix3d::Identity();
  Eigen::Vector3d right = Eigen::Vector3d::Constant(pull);
  for (const MeasuredStep& step : steps) {
    const Eigen::Vector3d shares = parts_of(step.predicted) / step.predicted.seconds;
    normal += shares * shares.transpose();
    right += shares * (step.seconds / step.predicted.seconds);
  }
  const Eigen::Vector3d factors = normal.ldlt().solve(right).cwiseMax(least).cwiseMin(most);
  return {factors[0], factors[1], factors[2]};
}

config::Machine corrected(config::Machine machine, const Correction& by) {
  for (config::DeviceRates& rates : machine.rates) {
    for (config::ProductRates& products : rates.products) slow_down(products, by.kernels);
    if (rates.update == 0) rates.update = rates.bandwidth;
    rates.bandwidth /= by.kernels, rates.latency *= by.kernels, rates.launch *= by.kernels;
    for (config::FamilyRate& family : rates.families) family.bandwidth /= by.kernels;
    rates.update /= by.update;
  }
  for (config::Link& link : machine.links)
    link.bandwidth /= by.exchange, link.sum_bandwidth /= by.exchange, link.latency *= by.exchange;
  config::Host& host = machine.host;
  host.update /= by.update, host.to_device /= by.update, host.from_device /= by.update;
  machine.drive.read /= by.update, machine.drive.write /= by.update;
  return machine;
}

}  // namespace sherd::planning
