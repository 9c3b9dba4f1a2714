#include "engine/report/prometheus.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <list>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "base/version.h"
#include "comm/tcp/socket.h"
#include "engine/report/report.h"

namespace sherd::engine {
namespace {

/// Builds the text: a family's HELP and TYPE, then its samples.
class Families {
 public:
  Families& begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = cat("sherd_", name);
    text_ += cat("# HELP ", name_, ' ', help, "\n# TYPE ", name_, ' ', type, '\n');
    return *this;
  }
  /// `labels`: `rank="3"`; its values need no escaping.
  Families& sample(double value, const std::string& labels = "") {
    text_ += cat(name_, labels.empty() ? "" : cat('{', labels, '}'), ' ',
                 std::isnan(value)   ? "NaN"
                 : std::isinf(value) ? (value > 0 ? "+Inf" : "-Inf")
                                     : exact(value),
                 '\n');
    return *this;
  }
  void gauge(std::string_view name, std::string_view help, double value) {
    begin(name, "gauge", help).sample(value);
  }
  void counter(std::string_view name, std::string_view help, double value) {
    begin(name, "counter", help).sample(value);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_, name_;
};

}  // namespace

void PrometheusText::add(const StepMetrics& step) {
  last_ = step;
  if (step.val_loss) val_loss_ = step.val_loss;
  skipped_ += step.skipped;
  io_.read += step.io.read, io_.written += step.io.written;
  for (const auto& [axis, bytes] : step.axes) sent_[std::string(comm::name_of(axis))] += bytes.payload();
  ranks_.resize(step.ranks.size());
  for (std::size_t r = 0; r < ranks_.size(); ++r)
    ranks_[r].compute += step.ranks[r].own() * 1e-3, ranks_[r].wait += step.ranks[r].wait * 1e-3;
}

std::string PrometheusText::text() const {
  Families out;
  out.begin("build_info", "gauge", "The program's version.").sample(1, cat("version=\"", version(), '"'));
  out.counter("restarts_total", "Starts of the run by its launcher before this one.", restarts_);
  if (last_.step == 0) return out.text();
  const auto count = [](auto value) { return static_cast<double>(value); };
  out.gauge("step", "Optimizer steps done.", count(last_.step));
  out.gauge("loss", "Mean loss of the newest step.", last_.loss);
  if (val_loss_) out.gauge("validation_loss", "Mean loss of the newest evaluation.", *val_loss_);
  out.gauge("learning_rate", "Rate of the newest step, of parameter group 0.", last_.lr);
  out.gauge("gradient_norm", "Norm of the gradients before clipping.", last_.grad_norm);
  out.gauge("loss_scale", "Scale of the loss, of fp16.", last_.loss_scale);
  out.counter("skipped_steps_total", "Steps that changed nothing.", count(skipped_));
  out.counter("tokens_total", "Tokens, or samples, of all ranks since the beginning of training.",
              count(last_.tokens));
  out.gauge("tokens_per_second", "Tokens, or samples, of all ranks per second of the newest step.",
            last_.tokens_per_s);
  out.gauge("step_seconds", "Wall time of the newest step.", last_.step_ms * 1e-3);
  if (last_.mfu) out.gauge("mfu", "Share of the machine's speed that the newest step reached.", *last_.mfu);
  out.begin("memory_peak_bytes", "gauge", "The most that rank 0 has held, by tier.")
      .sample(count(last_.mem.device_peak), "tier=\"device\"")
      .sample(count(last_.mem.host_peak), "tier=\"host\"")
      .sample(count(last_.mem.nvme_peak), "tier=\"nvme\"");
  out.counter("nvme_read_bytes_total", "Bytes that rank 0 has read from NVMe.", count(io_.read));
  out.counter("nvme_written_bytes_total", "Bytes that rank 0 has written to NVMe.", count(io_.written));
  if (!sent_.empty())
    out.begin("communication_bytes_total", "counter",
              "Payload that left rank 0 for other ranks, by axis of the grid.");
  for (const auto& [axis, bytes] : sent_) out.sample(count(bytes), cat("axis=\"", axis, '"'));
  if (last_.saved_step >= 0)
    out.gauge("checkpoint_step", "Step of the newest whole checkpoint in training.save_dir.",
              count(last_.saved_step));
  if (last_.local.step >= 0) {
    out.gauge("local_checkpoint_step", "Step of the newest whole local checkpoint.", count(last_.local.step));
    out.gauge("local_checkpoint_bytes", "Size of all ranks' files of it, each counted once.",
              count(last_.local.bytes));
  }
  if (last_.local.seconds > 0)
    out.gauge("local_checkpoint_seconds", "Time from its beginning until all machines had it.",
              last_.local.seconds);
  if (ranks_.empty()) return out.text();
  out.begin("rank_compute_seconds_total", "counter", "Time of a rank's steps that was its own.");
  for (std::size_t r = 0; r < ranks_.size(); ++r) out.sample(ranks_[r].compute, cat("rank=\"", r, '"'));
  out.begin("rank_wait_seconds_total", "counter", "Time of a rank's steps that it waited for other ranks.");
  for (std::size_t r = 0; r < ranks_.size(); ++r) out.sample(ranks_[r].wait, cat("rank=\"", r, '"'));
  return out.text();
}

// ---- a file ----

MetricsTextfile::MetricsTextfile(std::filesystem::path path, double every_seconds)
    : path_(std::move(path)), every_seconds_(every_seconds), next_(Deadline::after_seconds(every_seconds)) {
  write_file_atomically(path_, metrics_.text());
}

MetricsTextfile::~MetricsTextfile() {
  if (is_behind_) write();
}

void MetricsTextfile::tell(const StepMetrics& step) {
  metrics_.add(step);
  is_behind_ = true;
  if (next_.passed()) write();
}

void MetricsTextfile::write() {
  next_ = Deadline::after_seconds(every_seconds_);
  is_behind_ = false;
  try {
    write_file_atomically(path_, metrics_.text(), false);  // between two steps, for which all ranks wait
    failed_ = false;
  } catch (const Error& error) {
    if (!std::exchange(failed_, true)) log_warning("metrics are not up to date: ", error.what());
  }
}

// ---- HTTP ----

namespace {

constexpr std::size_t most_connections = 4, longest_request = 8 << 10;

sockaddr_storage numeric_address(const std::string& text, int port) {
  sockaddr_storage out{};
  sockaddr_in v4{};
  sockaddr_in6 v6{};
  v4.sin_family = AF_INET, v6.sin6_family = AF_INET6;
  if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1)
    std::memcpy(&out, &v4, sizeof v4);
  else if (::inet_pton(AF_INET6, text.c_str(), &v6.sin6_addr) == 1)
    std::memcpy(&out, &v6, sizeof v6);
  else
    fail(ErrorKind::usage, "'", excerpt(text),
         "' is no address of this machine to listen on for metrics: give "
         "one in numbers, as 127.0.0.1, ::1 or 0.0.0.0");
  return comm::with_port(out, port);
}

std::string response(std::string_view status, const std::string& body, std::string_view more = "") {
  return cat("HTTP/1.1 ", status, "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n", more,
             "Content-Length: ", body.size(), "\r\nConnection: close\r\n\r\n", body);
}

}  // namespace

struct MetricsServer::Connection {
  FileDescriptor socket;
  Deadline deadline;
  std::string request{}, reply{};
  std::size_t sent = 0;
};

MetricsServer::MetricsServer(const std::string& address, int port, double connection_seconds,
                             double patience_seconds)
    : connection_seconds_(connection_seconds) {
  const sockaddr_storage at = numeric_address(address, port);
  const Deadline patience = Deadline::after_seconds(patience_seconds);
  while (!(listener_ = comm::listen_on(at)) && errno == EADDRINUSE && !patience.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (!listener_)
    fail(ErrorKind::config, "metrics cannot be served on ", comm::text_of(at), ": ", comm::system_reason(),
         ": give another port (--metrics-port), or address (--metrics-address)");
  url_ = cat("http://", comm::text_of(comm::with_port(at, this->port())), "/metrics");
  wake_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC));
  require(static_cast<bool>(wake_), "no eventfd: ", comm::system_reason());
  thread_ = std::thread(own_thread([this] { serve(); }));
}

MetricsServer::~MetricsServer() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t ignored = ::write(wake_.get(), &one, sizeof one);
  thread_.join();
}

int MetricsServer::port() const {
  return comm::port_of(listener_);
}

void MetricsServer::tell(const StepMetrics& step) {
  const std::lock_guard lock(mutex_);
  metrics_.add(step);
}

void MetricsServer::serve() {
  std::list<Connection> open;
  for (;;) {
    std::vector<pollfd> waiting{{wake_.get(), POLLIN, 0}};
    const bool accepts = open.size() < most_connections;
    waiting.push_back({accepts ? listener_.get() : -1, POLLIN, 0});
    for (const Connection& each : open)
      waiting.push_back({each.socket.get(), static_cast<short>(each.reply.empty() ? POLLIN : POLLOUT), 0});
    ::poll(waiting.data(), waiting.size(), open.empty() ? -1 : 100);
    if (waiting[0].revents != 0) return;
    open.remove_if([this](Connection& each) { return each.deadline.passed() || !move_on(each); });
    if (!accepts || waiting[1].revents == 0) continue;
    if (FileDescriptor socket = comm::accept_from(listener_))
      open.push_back({std::move(socket), Deadline::after_seconds(connection_seconds_)});
    else
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // no descriptors are left, or it has gone
  }
}

/// Reads or writes what can be without waiting; false when the connection is at its end.
bool MetricsServer::move_on(Connection& connection) {
  const int fd = connection.socket.get();
  const auto later = [] { return errno == EAGAIN || errno == EINTR; };
  if (connection.reply.empty()) {
    std::array<char, 2048> bytes;
    const ssize_t count = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (count <= 0) return count < 0 && later();
    connection.request.append(bytes.data(), static_cast<std::size_t>(count));
    const bool whole = connection.request.find("\r\n\r\n") != std::string::npos ||
                       connection.request.find("\n\n") != std::string::npos;
    if (whole)
      connection.reply = answer(connection.request);
    else if (connection.request.size() > longest_request)
      connection.reply = response("431 Request Header Fields Too Large", "the request is too long\n");
    if (connection.reply.empty()) return true;
  }
  const ssize_t count = ::send(fd, connection.reply.data() + connection.sent,
                               connection.reply.size() - connection.sent, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (count < 0) return later();
  connection.sent += static_cast<std::size_t>(count);
  return connection.sent < connection.reply.size();
}

std::string MetricsServer::answer(const std::string& request) {
  const std::string line = request.substr(0, request.find_first_of("\r\n"));
  const std::size_t method = line.find(' '), path = line.find(' ', method + 1);
  if (method == std::string::npos || path == std::string::npos || !line.substr(path + 1).starts_with("HTTP/"))
    return response("400 Bad Request", "this is no request of HTTP\n");
  const std::string target = line.substr(method + 1, path - method - 1);
  if (target.substr(0, target.find('?')) != "/metrics")
    return response("404 Not Found", "metrics are at /metrics\n");
  if (line.substr(0, method) != "GET")
    return response("405 Method Not Allowed", "GET reads /metrics\n", "Allow: GET\r\n");
  PrometheusText metrics;
  {
    const std::lock_guard lock(mutex_);
    metrics = metrics_;
  }
  return response("200 OK", metrics.text());
}

}  // namespace sherd::engine
