#include "comm/tcp/rendezvous.h"

#include <netdb.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <thread>
#include <type_traits>

#include "base/error.h"
#include "base/log.h"
#include "comm/exchange/call.h"

namespace sherd::comm {
namespace {

/// Who comes, and where others reach it. Plain bytes, sent as they are.
struct Hello {
  std::uint64_t magic = 0;
  std::int32_t rank = 0, world_size = 0, port = 0;
  char run[84] = {};
  Identity identity;
  sockaddr_storage address{};  ///< filled in by rank 0, which sees it
};
static_assert(std::is_trivially_copyable_v<Hello>);

/// "sherd", and what programs that understand each other have in common.
constexpr std::uint64_t magic = 0x6472656873ULL << 16 | sizeof(Hello);

enum class Status : std::uint32_t { welcome, other_run, refused, all_here };

/// To whoever said a Hello: welcome, then all_here or refused. After `refused` come `bytes` of text, after
/// `all_here` everybody's Hello.
struct Answer {
  std::uint64_t magic = comm::magic;
  Status status = Status::welcome;
  std::uint32_t bytes = 0;
};

/// Strangers, and ranks that wait, are given this long to take or to say what is due.
constexpr double moment = 5;

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

/// One rank's side of the meeting.
class Meeter {
 public:
  Meeter(const LaunchEnvironment& launch, const Patience& patience)
      : launch_(launch),
        patience_(patience),
        deadline_(Deadline::after_seconds(patience.seconds)),
        notice_(Deadline::after_seconds(10)),
        links_(at(launch.world_size)),
        hellos_(at(launch.world_size)) {}
  Meeting run();

 private:
  /// Someone who has connected and not yet said who it is.
  struct Knocking {
    Descriptor socket;
    Hello hello;
    std::size_t have = 0;
    Deadline until = Deadline::after_seconds(moment);
  };

  void listen();
  Hello own_hello() const;
  /// Lets ranks `first` and above in until all are here.
  void admit(int first);
  void accept_all();
  /// Reads what has come; true when nothing more is to be expected of it.
  bool hear(Knocking& one, int first);
  void welcome(Knocking& one, int first);
  std::vector<int> missing(int first) const;
  void watch_links();
  void gather_at_master();
  void go_to_master();
  bool ask_master(Descriptor& socket, std::string& why);
  void await_all();
  void go_to_peer(int rank);
  void tell_once(const std::string& what);
  /// Throws, after telling everybody here.
  [[noreturn]] void end(const std::string& reason);
  std::string master() const { return cat(launch_.master_address, ":", launch_.master_port); }

  const LaunchEnvironment& launch_;
  const Patience& patience_;
  Deadline deadline_, notice_;
  bool noticed_ = false;
  Descriptor listener_;
  std::vector<Descriptor> links_;
  std::vector<Hello> hellos_;
  std::vector<Knocking> knocking_;
  std::set<std::pair<int, std::string>> turned_away_;  ///< rank and run
  sockaddr_storage master_address_{};                  ///< as this rank reached it
};

bool answer(const Descriptor& socket, Status status, const void* data = nullptr, std::size_t bytes = 0) {
  Answer head;
  head.status = status, head.bytes = static_cast<std::uint32_t>(bytes);
  const Deadline deadline = Deadline::after_seconds(moment);
  return send_all(socket, &head, sizeof head, deadline) && send_all(socket, data, bytes, deadline);
}

std::string text_after(const Descriptor& socket, const Answer& head) {
  std::string text(std::min<std::size_t>(head.bytes, 4000), ' ');
  return receive_all(socket, text.data(), text.size(), Deadline::after_seconds(moment)) ? text : "";
}

void Meeter::end(const std::string& reason) {
  const std::string text = cat(patience_.what, ": ", reason);
  if (launch_.rank == 0)
    for (const Descriptor& link : links_)
      if (link) answer(link, Status::refused, text.data(), text.size());
  throw Error(ErrorKind::comm, text);
}

void Meeter::tell_once(const std::string& what) {
  if (noticed_ || !notice_.passed()) return;
  noticed_ = true;
  log_info("rank ", launch_.rank, " of ", launch_.world_size, " still waits: ", what);
}

/// The addresses that a host has for connections to `port`. None, with the reason, where the system knows
/// none.
std::vector<sockaddr_storage> addresses_of(const std::string& host, int port, int flags, std::string& why) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM, hints.ai_flags = flags;
  const int status = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) why = gai_strerror(status);
  std::vector<sockaddr_storage> out;
  for (const addrinfo* each = found; each; each = each->ai_next)
    std::memcpy(&out.emplace_back(), each->ai_addr,
                std::min<std::size_t>(each->ai_addrlen, sizeof out.back()));
  if (found) freeaddrinfo(found);
  return out;
}

/// Where a master's address means this machine to everybody, so that all ranks are here: its addresses; else
/// none. A machine's name does not say that: it may stand for a loopback address on that machine only.
std::vector<sockaddr_storage> inside_addresses(const std::string& host) {
  std::string why;
  std::vector<sockaddr_storage> out = addresses_of(host, 0, host == "localhost" ? 0 : AI_NUMERICHOST, why);
  std::erase_if(out, [](const sockaddr_storage& address) { return !is_loopback(address); });
  return out;
}

/// On the port of the first of `addresses` that the machine has, or of all where there are none.
Descriptor listen_at(const std::vector<sockaddr_storage>& addresses, int port) {
  if (addresses.empty()) return listen_on(port);
  Descriptor out;
  for (const sockaddr_storage& address : addresses)
    if ((out = listen_on(with_port(address, port))) || errno == EADDRINUSE) break;
  return out;
}

void Meeter::listen() {
  const bool master = launch_.rank == 0;
  const auto inside = inside_addresses(launch_.master_address);
  // What an earlier run left behind may need a moment to end.
  const Deadline patience = Deadline::after_seconds(std::min(moment, patience_.seconds));
  while (!(listener_ = listen_at(inside, master ? launch_.master_port : 0)) && errno == EADDRINUSE &&
         !patience.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (listener_) return;
  if (master)
    end(cat("rank 0 cannot listen on port ", launch_.master_port, ": ", system_reason(),
            "; end what uses it, or give another MASTER_PORT (torchrun --master-port)"));
  end(cat("rank ", launch_.rank, " cannot listen for the others: ", system_reason()));
}

Hello Meeter::own_hello() const {
  Hello out;
  out.magic = magic, out.rank = launch_.rank, out.world_size = launch_.world_size,
  out.port = port_of(listener_);
  std::memcpy(out.run, launch_.run.data(), std::min(launch_.run.size(), sizeof out.run - 1));
  out.identity = own_identity();
  return out;
}

std::vector<int> Meeter::missing(int first) const {
  std::vector<int> out;
  for (int r = first; r < launch_.world_size; ++r)
    if (!links_[at(r)]) out.push_back(r);
  return out;
}

// ---- letting others in ----

void Meeter::admit(int first) {
  for (std::vector<int> absent = missing(first); !absent.empty(); absent = missing(first)) {
    if (deadline_.passed())
      end(cat(name_ranks(absent), " did not come to rank ", launch_.rank, " within ", patience_.seconds,
              " s; see their own output, and whether WORLD_SIZE processes were started with the same "
              "MASTER_ADDR and "
              "MASTER_PORT"));
    tell_once(cat(name_ranks(absent), absent.size() == 1 ? " has" : " have", " not come to ", master()));
    std::vector<pollfd> open{{listener_.get(), POLLIN, 0}};
    for (const Knocking& one : knocking_) open.push_back({one.socket.get(), POLLIN, 0});
    for (const Descriptor& link : links_)
      if (link) open.push_back({link.get(), POLLRDHUP, 0});
    poll(open.data(), open.size(), 100);
    accept_all();
    for (std::size_t i = knocking_.size(); i-- > 0;)
      if (hear(knocking_[i], first)) knocking_.erase(knocking_.begin() + static_cast<std::ptrdiff_t>(i));
    watch_links();
  }
}

void Meeter::accept_all() {
  for (;;) {
    Descriptor socket = accept_from(listener_);
    const bool full = !socket && (errno == EMFILE || errno == ENFILE);
    if (full && !knocking_.empty()) {  // who has said nothing for longest makes room; a rank would come again
      knocking_.erase(knocking_.begin());
      return;
    }
    if (full)
      end(cat("rank ", launch_.rank, " cannot open more connections: ", system_reason(),
              "; every rank needs one to every other: raise the limit with ulimit -n"));
    if (!socket) return;
    knocking_.emplace_back().socket = std::move(socket);
  }
}

bool Meeter::hear(Knocking& one, int first) {
  auto* bytes = reinterpret_cast<std::byte*>(&one.hello);
  const ssize_t count = recv(one.socket.get(), bytes + one.have, sizeof one.hello - one.have, MSG_DONTWAIT);
  if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return true;
  if (count < 0) return one.until.passed();
  one.have += static_cast<std::size_t>(count);
  if (one.have >= sizeof one.hello.magic && one.hello.magic != magic) return true;
  if (one.have < sizeof one.hello) return false;
  welcome(one, first);
  return true;
}

/// Who says that it is a rank of this run: is it?
void Meeter::welcome(Knocking& one, int first) {
  Hello& hello = one.hello;
  hello.run[sizeof hello.run - 1] = 0;
  const std::string run = hello.run, own = own_hello().run;
  if (run != own) {
    const std::string text = cat("belongs to run '", own, "', not to '", run, "'");
    answer(one.socket, Status::other_run, text.data(), text.size());
    // It tries again and again.
    if (turned_away_.emplace(hello.rank, run).second)
      log_warning("turned away rank ", hello.rank, " of another run ('", run, "', this one is '", own, "')");
    return;
  }
  const auto contradiction = [&](const std::string& reason) {
    const std::string text = cat(patience_.what, ": ", reason);
    answer(one.socket, Status::refused, text.data(), text.size());
    end(reason);
  };
  if (hello.world_size != launch_.world_size || hello.rank < first || hello.rank >= launch_.world_size)
    contradiction(
        cat("a process came as rank ", hello.rank, " of ", hello.world_size, ", where this is rank ",
            launch_.rank, " of ", launch_.world_size,
            ": RANK and WORLD_SIZE differ between the processes, or one of an earlier run is still alive"));
  if (links_[at(hello.rank)])
    contradiction(
        cat("two processes came as rank ", hello.rank,
            "; every process needs a RANK of its own, and those of an earlier run must have ended"));
  if (!answer(one.socket, Status::welcome)) return;
  hello.address = with_port(peer_of(one.socket), hello.port);
  hellos_[at(hello.rank)] = hello, links_[at(hello.rank)] = std::move(one.socket);
}

void Meeter::watch_links() {
  for (int r = 0; r < launch_.world_size; ++r) {
    if (!links_[at(r)]) continue;
    pollfd one{links_[at(r)].get(), POLLRDHUP, 0};
    if (poll(&one, 1, 0) > 0 && (one.revents & (POLLRDHUP | POLLHUP | POLLERR)))
      end(cat("rank ", r, " ended before all ranks had met; see its own output"));
  }
}

void Meeter::gather_at_master() {
  admit(1);
  for (int r = 1; r < launch_.world_size; ++r)
    if (!answer(links_[at(r)], Status::all_here, hellos_.data(), hellos_.size() * sizeof(Hello)))
      end(cat("rank ", r, " ended before all ranks had met; see its own output"));
}

// ---- going to others ----

/// Says hello; false, with the reason, when whoever listens there is not this run's rank 0.
bool Meeter::ask_master(Descriptor& socket, std::string& why) {
  const Hello mine = own_hello();
  Answer head;
  const auto soon = Deadline(
      std::min(deadline_.at() - Deadline::Clock::now(), Deadline::Clock::duration(std::chrono::seconds(10))));
  if (!send_all(socket, &mine, sizeof mine, soon) || !receive_all(socket, &head, sizeof head, soon) ||
      head.magic != magic) {
    why = "what listens there does not answer as Sherd's rank 0";
    return false;
  }
  if (head.status == Status::refused) throw Error(ErrorKind::comm, text_after(socket, head));
  if (head.status != Status::other_run) return true;
  why = cat("the rank 0 there ", text_after(socket, head));
  return false;
}

/// Tries until the deadline, since rank 0 may start later.
void Meeter::go_to_master() {
  std::string why = "it was not tried";
  do {
    for (const sockaddr_storage& each : addresses_of(launch_.master_address, launch_.master_port, 0, why)) {
      Descriptor socket = connect_to(reinterpret_cast<const sockaddr*>(&each), length_of(each), deadline_);
      if (!socket)
        why = system_reason();
      else if (ask_master(socket, why)) {
        master_address_ = peer_of(socket);
        links_[0] = std::move(socket);
        return;
      }
    }
    tell_once(cat("rank 0 is not reached at ", master(), ": ", why));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  } while (!deadline_.passed());
  end(cat("rank ", launch_.rank, " could not reach rank 0 at ", master(), " within ", patience_.seconds,
          " s: ", why,
          "; see whether rank 0 runs, and MASTER_ADDR and MASTER_PORT are the same for all ranks"));
}

void Meeter::await_all() {
  // Rank 0 began before it let this rank in, so its deadline passes first: it knows who is missing, and says
  // so.
  deadline_ = Deadline::after_seconds(patience_.seconds + moment);
  Answer head;
  const Deadline notice = Deadline(std::min(notice_.at(), deadline_.at()) - Deadline::Clock::now());
  bool came = false;
  {
    // The first byte tells whether it is time to say that this takes long.
    pollfd one{links_[0].get(), POLLIN, 0};
    while (!came && !notice.passed()) came = poll(&one, 1, 100) > 0;
  }
  if (!came) tell_once(cat("rank 0 at ", master(), " has not seen all ranks"));
  if (!receive_all(links_[0], &head, sizeof head, deadline_)) {
    if (deadline_.passed())
      end(cat("not all ranks came to rank 0 at ", master(), " within ", patience_.seconds,
              " s; see its own output"));
    end("rank 0 ended before all ranks had met; see its own output");
  }
  if (head.status == Status::refused) throw Error(ErrorKind::comm, text_after(links_[0], head));
  if (head.status != Status::all_here || head.bytes != hellos_.size() * sizeof(Hello) ||
      !receive_all(links_[0], hellos_.data(), head.bytes, deadline_))
    end("rank 0 ended before all ranks had met; see its own output");
}

void Meeter::go_to_peer(int rank) {
  sockaddr_storage address = hellos_[at(rank)].address;
  // Rank 0 knows ranks of its own machine by an address that means something there only.
  if (is_loopback(address)) address = with_port(master_address_, hellos_[at(rank)].port);
  Descriptor socket;
  for (int turn = 0; turn < 3 && !socket && !deadline_.passed(); ++turn)
    socket = connect_to(reinterpret_cast<const sockaddr*>(&address), length_of(address), deadline_);
  if (!socket)
    end(cat("rank ", launch_.rank, " could not reach rank ", rank, " at ", text_of(address), ": ",
            system_reason(),
            "; see that rank's own output, and whether the machines let each other in on all ports"));
  const Hello mine = own_hello();
  Answer head;
  if (!send_all(socket, &mine, sizeof mine, deadline_) || !receive_all(socket, &head, sizeof head, deadline_))
    end(cat("rank ", rank, " ended before all ranks had met; see its own output"));
  if (head.magic == magic && head.status == Status::refused)
    throw Error(ErrorKind::comm, text_after(socket, head));
  if (head.magic != magic || head.status != Status::welcome)
    end(cat("rank ", launch_.rank, " found something else than rank ", rank, " at ", text_of(address)));
  links_[at(rank)] = std::move(socket);
}

Meeting Meeter::run() {
  listen();
  if (launch_.rank == 0) {
    hellos_[0] = own_hello();
    gather_at_master();
  } else {
    go_to_master();
    await_all();
    for (int r = 1; r < launch_.rank; ++r) go_to_peer(r);
    admit(launch_.rank + 1);
  }
  Meeting out;
  out.links = std::move(links_);
  for (const Hello& hello : hellos_) out.identities.push_back(hello.identity);
  hide_unseen(out.identities);
  return out;
}

}  // namespace

Meeting rendezvous(const LaunchEnvironment& launch, const Patience& patience) {
  return Meeter(launch, patience).run();
}

}  // namespace sherd::comm
