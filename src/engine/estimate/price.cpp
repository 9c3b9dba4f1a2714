#include "engine/estimate/price.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sherd::engine {
namespace {

using comm::Collective;
using comm::CommWork;
using config::DeviceRates;
using config::ProductRates;
using tensor::KernelFamily;
using tensor::KernelWork;

/// The share of the units that the tiles of a product keep busy; where there are few tiles, smaller ones do.
double share_of_units(const KernelWork& work, const DeviceRates& rates) {
  if (rates.units == 0) return 1;
  double best = 0;
  double rows = static_cast<double>(rates.tile_rows), columns = static_cast<double>(rates.tile_columns);
  for (double efficiency = 1; efficiency > 0.5; efficiency *= 0.9) {
    const double tiles = std::ceil(static_cast<double>(work.rows) / rows) *
                         std::ceil(static_cast<double>(work.columns) / columns);
    const double waves = std::ceil(tiles / static_cast<double>(rates.units));
    const double used = static_cast<double>(work.rows) * static_cast<double>(work.columns) /
                        (rows * columns * waves * static_cast<double>(rates.units));
    best = std::max(best, efficiency * std::min(1.0, used));
    (rows > columns ? rows : columns) /= 2;
  }
  return best;
}

/// The mean of the measured rates, those of like extents first: weighed by the inverse fourth power of the
/// distance between logarithms.
double measured_rate(const KernelWork& work, const std::vector<config::MeasuredProduct>& measured) {
  const auto distance = [](std::int64_t a, std::int64_t b) {
    return std::log2(static_cast<double>(std::max<std::int64_t>(a, 1)) /
                     static_cast<double>(std::max<std::int64_t>(b, 1)));
  };
  double weights = 0, sum = 0;
  for (const config::MeasuredProduct& point : measured) {
    const double r = distance(work.rows, point.rows), c = distance(work.columns, point.columns),
                 d = distance(work.depth, point.depth);
    const double squared = r * r + c * c + d * d;
    if (squared < 1e-9) return point.flops;
    weights += 1 / (squared * squared);
    sum += std::log(point.flops) / (squared * squared);
  }
  return std::exp(sum / weights);
}

double product_rate(const KernelWork& work, const DeviceRates& rates) {
  const ProductRates& products = products_of(work.dtype, rates);
  if (!products.measured.empty()) return measured_rate(work, products.measured);
  const double depth = static_cast<double>(work.depth), faster = work.fp8 ? products.fp8 : 1;
  return products.peak * faster * products.efficiency * depth / (depth + faster * products.half_depth) *
         share_of_units(work, rates);
}

double attention_seconds(const KernelWork& work, const DeviceRates& rates) {
  const ProductRates& products = products_of(work.dtype, rates);
  const config::AttentionRates& attention = products.attention;
  const double keys = static_cast<double>(work.keys), width = static_cast<double>(work.depth);
  const double rate = products.peak * (work.backward ? attention.backward : attention.forward) * keys /
                      (keys + attention.half_keys) * width / (width + attention.half_width);
  const double stored = work.backward ? attention.backward_score_bytes : attention.forward_score_bytes;
  // Scores that are stored are formed all, also those that no query sees.
  const double formed = stored > 0 ? work.pairs / work.scores : 1;
  return std::max(work.flops * formed / rate, work.bytes / rates.bandwidth) +
         stored * work.pairs / rates.bandwidth;
}

/// The bandwidth of the kernel's family in its type, else in another type, else the device's.
double bandwidth_of(const KernelWork& work, const DeviceRates& rates) {
  const std::string_view name = tensor::kernel_families[static_cast<std::size_t>(work.family)];
  double other = rates.bandwidth;
  for (const config::FamilyRate& rate : rates.families) {
    if (rate.family != name) continue;
    if (!rate.dtype || *rate.dtype == work.dtype) return rate.bandwidth;
    other = rate.bandwidth;
  }
  return other;
}

bool sums(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce_scatter;
}

/// The group's ranks that a link joins.
int joined(const CommWork& work, const config::Link& link) {
  if (link.ranks == 0) return work.ranks;
  return static_cast<int>(std::clamp<std::int64_t>(link.ranks / work.stride, 1, work.ranks));
}

}  // namespace

const ProductRates& products_of(DType dtype, const DeviceRates& rates) {
  for (const ProductRates& products : rates.products)
    if (products.dtype == dtype) return products;
  const bool narrow = size_of(dtype) == 2;
  for (const ProductRates& products : rates.products)
    if ((size_of(products.dtype) == 2) == narrow) return products;
  return rates.products.front();
}

double seconds_of(const KernelWork& work, const DeviceRates& rates) {
  double seconds = 0;
  if (work.family == KernelFamily::gemm)
    seconds = std::max(work.flops / product_rate(work, rates), work.bytes / rates.bandwidth);
  else if (work.family == KernelFamily::attention && work.flops > 0)
    seconds = attention_seconds(work, rates);
  else
    seconds = work.bytes / bandwidth_of(work, rates);
  return seconds + rates.latency;
}

double seconds_of(const CommWork& work, const config::Machine& machine) {
  if (work.ranks == 1 || work.kind == Collective::receive || machine.links.empty()) return 0;
  const double ranks = work.ranks;
  double seconds = 0, latency = 0;
  int within = 1;  // ranks that the links before this one join
  for (const config::Link& link : machine.links) {
    const int here = joined(work, link);
    if (here == within) continue;
    const double bandwidth = sums(work.kind) && link.sum_bandwidth > 0 ? link.sum_bandwidth : link.bandwidth;
    const double bytes = static_cast<double>(work.bytes);
    const double blocks = static_cast<double>(here) / within;
    double over = 0;
    if (work.kind == Collective::send)
      over = bytes;
    else if (work.kind == Collective::all_to_all)
      over = bytes * (here - within) / (ranks - 1);
    else
      over = bytes * ranks / (ranks - 1) * (blocks - 1) / blocks / within;
    seconds = std::max(seconds, over / bandwidth);
    // Ranks that pass something on together wait for those that pass it the furthest.
    latency = work.kind == Collective::send ? link.latency : latency + link.latency * (std::log2(blocks) + 1);
    within = here;
  }
  return seconds + latency;
}

double PassSeconds::computing() const {
  return std::accumulate(kernels.begin(), kernels.end(), 0.0);
}

PassSeconds price(const std::vector<Work>& pass, const config::Machine& machine, const DeviceRates& rates,
                  Counted which) {
  PassSeconds out;
  double calls_end = 0, queued = 0;  // when the last call ends; when the host has queued what came so far
  for (const Work& work : pass) {
    if (const auto* kernel = std::get_if<KernelWork>(&work)) {
      if (which != Counted::all && kernel->weight_gradient != (which == Counted::weight_gradients)) continue;
      queued += rates.launch;
      const double seconds = seconds_of(*kernel, rates);
      out.kernels[static_cast<std::size_t>(kernel->family)] += seconds;
      out.seconds += seconds, out.flops += kernel->flops;
      if (kernel->host_reads) queued = out.seconds = std::max(out.seconds, queued);
      continue;
    }
    if (which == Counted::weight_gradients) continue;
    queued += rates.launch;
    const auto& call = std::get<CommWork>(work);
    const double seconds = seconds_of(call, machine);
    calls_end = std::max(out.seconds, calls_end) + seconds;
    out.calls += seconds;
    if (!call.async)
      out.seconds = calls_end;
    else
      out.seconds += (1 - rates.overlap) * seconds;
  }
  out.seconds = std::max({out.seconds, calls_end, queued});
  out.exposed = out.seconds - out.computing();
  return out;
}

}  // namespace sherd::engine
