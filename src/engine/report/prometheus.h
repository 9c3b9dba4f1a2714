#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/files.h"
#include "comm/communicator.h"
#include "engine/report/metrics.h"

namespace sherd::engine {

/// A run's metrics in Prometheus' text format 0.0.4: gauges of the newest step, and counters since the
/// program began.
class PrometheusText {
 public:
  void add(const StepMetrics& step);
  std::string text() const;

 private:
  int restarts_ = comm::restarts();
  StepMetrics last_;
  std::optional<double> val_loss_;  ///< the newest evaluation's
  std::int64_t skipped_ = 0;
  IoBytes io_;
  std::map<std::string, std::uint64_t> sent_;  ///< payload by axis
  struct Seconds {
    double compute = 0, wait = 0;
  };
  std::vector<Seconds> ranks_;
};

/// Keeps that text in a file, for node_exporter's textfile collector: with the first step `every_seconds`
/// after the last time, and at its end, whole or not at all. Once it is there, what fails is a warning.
class MetricsTextfile {
 public:
  /// Writes it at once, without a step. Throws Error{io}.
  explicit MetricsTextfile(std::filesystem::path path, double every_seconds = 5);
  ~MetricsTextfile();
  MetricsTextfile(const MetricsTextfile&) = delete;
  MetricsTextfile& operator=(const MetricsTextfile&) = delete;

  /// A step has been made.
  void tell(const StepMetrics& step);

 private:
  void write();

  const std::filesystem::path path_;
  const double every_seconds_;
  PrometheusText metrics_;
  Deadline next_;
  bool is_behind_ = false;  ///< the file lacks a step
  bool failed_ = false;     ///< the last time
};

/// Answers GET /metrics over HTTP, on a thread of its own, until it goes. It never holds up who tells it. At
/// most a few connections are open at once, each for `connection_seconds`; requests have at most 8 KiB;
/// others wait.
class MetricsServer {
 public:
  /// Listens at once. `address`: an IPv4 or IPv6 address, "127.0.0.1", "::1", "0.0.0.0"; `port` 0: any.
  /// Throws Error{usage} for another address, and Error{config} where the port may not be had, or is still
  /// taken after `patience_seconds`: what an earlier run has left may need a moment to end.
  MetricsServer(const std::string& address, int port, double connection_seconds = 5,
                double patience_seconds = 0);
  ~MetricsServer();
  MetricsServer(const MetricsServer&) = delete;
  MetricsServer& operator=(const MetricsServer&) = delete;

  int port() const;
  /// "http://127.0.0.1:9401/metrics"
  const std::string& url() const { return url_; }
  /// A step has been made.
  void tell(const StepMetrics& step);

 private:
  struct Connection;
  void serve();
  bool move_on(Connection& connection);
  std::string answer(const std::string& request);

  const double connection_seconds_;
  FileDescriptor listener_, wake_;
  std::string url_;
  std::mutex mutex_;
  PrometheusText metrics_;  ///< guarded by mutex_
  std::thread thread_;
};

}  // namespace sherd::engine
