#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"

// Machines as data: the rates by which the time of a step is predicted (engine/estimate/price.h). A file
// has one machine, of data sheets and published measurements, or as `sherd bench machine` has measured it.
// FLOP/s, bytes and seconds throughout.

namespace sherd::config {

/// A product that was measured: [rows, depth]·[depth, columns].
struct MeasuredProduct {
  std::int64_t rows = 1, columns = 1, depth = 1;
  double flops = 0;  ///< per second
  bool operator==(const MeasuredProduct&) const = default;
};

/// Attention beside a product's rate.
struct AttentionRates {
  double forward = 0.5, backward = 0.5;  ///< shares of the type's `peak`, of long sequences and wide heads
  double half_keys = 0;                  ///< keys at which it reaches half of that
  double half_width = 0;                 ///< likewise a head's width
  /// Bytes that each score moves through memory, where they are formed there (before FlashAttention).
  double forward_score_bytes = 0, backward_score_bytes = 0;
  bool operator==(const AttentionRates&) const = default;
};

/// Products of matrices of one type, and attention in it.
struct ProductRates {
  DType dtype = DType::bf16;
  double peak = 0;        ///< FLOP/s, by the data sheet: what utilisation (MFU) is a share of
  double efficiency = 1;  ///< the share of it that large products reach
  /// The depth at which a product reaches half of that, since tiles take time to begin and to end.
  double half_depth = 0;
  /// The rate of products in FP8 over that of this type, by the data sheet; tiles begin and end in the same
  /// time. 1: there are none that are faster.
  double fp8 = 1;
  /// Measured products, which decide in place of these numbers where there are some: a product has the rate
  /// of those that are like it.
  std::vector<MeasuredProduct> measured{};
  AttentionRates attention{};
  bool operator==(const ProductRates&) const = default;
};

/// One family of kernels (tensor/kernel_list.h) that passes over memory at a rate of its own.
struct FamilyRate {
  std::string family;
  std::optional<DType> dtype{};  ///< of these elements; none: of all
  double bandwidth = 0;
  bool operator==(const FamilyRate&) const = default;
};

/// The rates of one rank's device while as many ranks as `ranks` says compute on the machine.
struct DeviceRates {
  std::int64_t ranks = 0;  ///< 0: any number, as each has a device of its own
  std::vector<ProductRates> products{};
  double bandwidth = 0;  ///< of memory that kernels pass over, bytes read and written per second
  double latency = 0;    ///< of a kernel, in seconds: what even the smallest takes
  double launch = 0;   ///< in which a thread queues a kernel or a call: a pass takes no less than all of them
  double overlap = 1;  ///< the share of a call that hides behind kernels where it runs beside them
  std::vector<FamilyRate> families{};
  double update = 0;  ///< bytes of states per second that the optimizer's step passes over; 0: bandwidth
  /// The tiles and units over which products are spread, where rows × columns do not fill them all; 0: they
  /// always do.
  std::int64_t units = 0, tile_rows = 128, tile_columns = 128;
  bool operator==(const DeviceRates&) const = default;
};

/// Ranks that reach each other: those of a machine, of a rack, or all.
struct Link {
  std::string name;
  std::int64_t ranks = 0;  ///< consecutive ranks that it joins; 0: all
  double bandwidth = 0;    ///< bytes per second that each rank sends while all send
  double latency = 0;      ///< of one message, in seconds
  /// The same for collectives that sum, where they are slower; 0: as others.
  double sum_bandwidth = 0;
  bool operator==(const Link&) const = default;
};

/// The processor beside accelerators, or the one that ranks compute on.
struct Host {
  std::uint64_t memory = 0;  ///< bytes of a machine
  double update = 0;  ///< bytes of states per second that a CPU optimizer passes over, all ranks together
  double to_device = 0, from_device = 0;  ///< bytes per second of each device's link; 0: there is none
  bool operator==(const Host&) const = default;
};

/// NVMe drives of a machine, all together.
struct Drive {
  std::uint64_t size = 0;
  double read = 0, write = 0;
  bool operator==(const Drive&) const = default;
};

struct Machine {
  std::string name;
  std::string source;        ///< where the rates come from
  std::int64_t devices = 1;  ///< ranks that one machine has place for
  std::uint64_t memory = 0;  ///< bytes of a device; 0: it is the host's
  std::vector<DeviceRates> rates{};
  std::vector<Link> links{};  ///< from the nearest ranks to all
  Host host{};
  Drive drive{};

  bool accelerator() const { return memory > 0; }
  /// The same with so many ranks on each machine: links within a machine join no more than these.
  Machine with_devices(std::int64_t ranks) const;
  /// The rates with so many ranks at work on each machine: those of the nearest number that the file has.
  const DeviceRates& rates_of(std::int64_t ranks) const;
  bool operator==(const Machine&) const = default;
};

/// Reads a machine's file. Throws Error{io} and Error{config} as parse_files() does.
Machine read_machine(const std::string& path);
/// The same from memory; `name` stands for the file in errors.
Machine parse_machine(std::string_view text, const std::string& name = "machine");
/// JSON that parse_machine() reads back to the same.
std::string dump(const Machine& machine);

}  // namespace sherd::config
