#include "comm/tcp/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <set>
#include <thread>

#include "base/error.h"
#include "base/log.h"
#include "comm/exchange/call.h"
#include "comm/tcp/greeting.h"

namespace sherd::comm {
namespace {

constexpr const char* early = " ended before all ranks had met; see its own output";

std::size_t at(int rank) {
  return static_cast<std::size_t>(rank);
}

/// One rank's side of the meeting.
class Rendezvous {
 public:
  Rendezvous(const LaunchEnvironment& launch, const Patience& patience)
      : launch_(launch),
        patience_(patience),
        deadline_(Deadline::after_seconds(patience.seconds)),
        notice_(Deadline::after_seconds(10)),
        links_(at(launch.world_size)),
        hellos_(at(launch.world_size)) {}
  Meeting run();

 private:
  /// Someone who has connected and not yet said who it is.
  struct PendingConnection {
    FileDescriptor socket;
    Hello hello;
    std::size_t have = 0;
    Deadline until = Deadline::after_seconds(handshake_timeout);
  };

  void listen();
  Hello own_hello() const;
  /// Lets ranks `first` and above in until all are here.
  void admit(int first);
  void accept_all();
  /// Reads what has come; true when nothing more is to be expected of it.
  bool read_hello(PendingConnection& one, int first);
  void accept_rank(PendingConnection& one, int first);
  std::vector<int> missing(int first) const;
  void watch_links();
  void gather_at_master();
  void go_to_master();
  bool ask_master(FileDescriptor& socket, std::string& why);
  void await_all();
  void go_to_peer(int rank);
  void tell_once(const std::string& what);
  void read_verdict();
  void read_reports();
  void tell_all(const std::string& text);
  void ask_verdict(const std::string& text);
  /// Throws, after telling everybody here.
  [[noreturn]] void end(const std::string& reason);
  std::string master() const { return cat(launch_.master_address, ":", launch_.master_port); }

  const LaunchEnvironment& launch_;
  const Patience& patience_;
  Deadline deadline_, notice_;
  bool noticed_ = false;
  bool told_ = false;  ///< rank 0 has told who all are, and waits until this rank has connected to them
  FileDescriptor listener_;
  std::vector<FileDescriptor> links_;
  std::vector<Hello> hellos_;
  std::vector<PendingConnection> pending_;
  std::set<std::pair<int, std::string>> turned_away_;  ///< rank and run
  sockaddr_storage master_address_{};                  ///< as this rank reached it
};

void Rendezvous::end(const std::string& reason) {
  const std::string text = cat(patience_.what, ": ", reason);
  if (launch_.rank == 0)
    tell_all(text);
  else if (told_)
    ask_verdict(text);
  throw Error(ErrorKind::comm, text);
}

void Rendezvous::tell_all(const std::string& text) {
  for (const FileDescriptor& link : links_)
    if (link) answer(link, GreetingStatus::refused, text.data(), text.size());
}

/// Tells rank 0 of this rank's trouble, and throws what that makes of it: whom this rank misses may have left
/// because of another, which rank 0 hears of first. Returns where rank 0 says nothing.
void Rendezvous::ask_verdict(const std::string& text) {
  Answer head;
  answer(links_[0], GreetingStatus::refused, text.data(), text.size());
  if (receive_all(links_[0], &head, sizeof head, Deadline::after_seconds(2 * handshake_timeout)) &&
      head.status == GreetingStatus::refused)
    throw Error(ErrorKind::comm, text_after(links_[0], head));
}

void Rendezvous::tell_once(const std::string& what) {
  if (noticed_ || !notice_.passed()) return;
  noticed_ = true;
  log_info("rank ", launch_.rank, " of ", launch_.world_size, " still waits: ", what);
}

void Rendezvous::listen() {
  const bool master = launch_.rank == 0;
  // Processes that an earlier run left behind may need a moment to end.
  const Deadline patience = Deadline::after_seconds(std::min(handshake_timeout, patience_.seconds));
  while (!(listener_ = listen_for(launch_.master_address, master ? launch_.master_port : 0)) &&
         errno == EADDRINUSE && !patience.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  if (listener_) return;
  if (master)
    end(cat("rank 0 cannot listen on port ", launch_.master_port, ": ", system_reason(),
            "; end what uses it, or give another MASTER_PORT (torchrun --master-port)"));
  end(cat("rank ", launch_.rank, " cannot listen for the others: ", system_reason()));
}

Hello Rendezvous::own_hello() const {
  Hello out;
  out.magic = magic, out.rank = launch_.rank, out.world_size = launch_.world_size,
  out.port = port_of(listener_);
  std::memcpy(out.run, launch_.run.data(), std::min(launch_.run.size(), sizeof out.run - 1));
  out.identity = own_identity(launch_.machine);
  return out;
}

std::vector<int> Rendezvous::missing(int first) const {
  std::vector<int> out;
  for (int r = first; r < launch_.world_size; ++r)
    if (!links_[at(r)]) out.push_back(r);
  return out;
}

// ---- letting others in ----

void Rendezvous::admit(int first) {
  for (std::vector<int> absent = missing(first); !absent.empty(); absent = missing(first)) {
    if (deadline_.passed())
      end(cat(name_ranks(absent), " did not come to rank ", launch_.rank, " within ", patience_.seconds,
              " s; see their own output, and whether WORLD_SIZE processes were started with the same "
              "MASTER_ADDR and MASTER_PORT"));
    tell_once(cat(name_ranks(absent), absent.size() == 1 ? " has" : " have", " not come to ", master()));
    std::vector<pollfd> open{{listener_.get(), POLLIN, 0}};
    for (const PendingConnection& one : pending_) open.push_back({one.socket.get(), POLLIN, 0});
    for (const FileDescriptor& link : links_)
      if (link) open.push_back({link.get(), POLLRDHUP, 0});
    poll(open.data(), open.size(), 100);
    accept_all();
    for (std::size_t i = pending_.size(); i-- > 0;)
      if (read_hello(pending_[i], first)) pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(i));
    watch_links();
  }
}

void Rendezvous::accept_all() {
  for (;;) {
    FileDescriptor socket = accept_from(listener_);
    const bool full = !socket && (errno == EMFILE || errno == ENFILE);
    if (full && !pending_.empty()) {  // who has said nothing for longest makes room; a rank would come again
      pending_.erase(pending_.begin());
      return;
    }
    if (full)
      end(cat("rank ", launch_.rank, " cannot open more connections: ", system_reason(),
              "; every rank needs one to every other: raise the limit with ulimit -n"));
    if (!socket) return;
    pending_.emplace_back().socket = std::move(socket);
  }
}

bool Rendezvous::read_hello(PendingConnection& one, int first) {
  auto* bytes = reinterpret_cast<std::byte*>(&one.hello);
  const ssize_t count = recv(one.socket.get(), bytes + one.have, sizeof one.hello - one.have, MSG_DONTWAIT);
  if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return true;
  if (count < 0) return one.until.passed();
  one.have += static_cast<std::size_t>(count);
  if (one.have >= sizeof one.hello.magic && one.hello.magic != magic) return true;
  if (one.have < sizeof one.hello) return false;
  accept_rank(one, first);
  return true;
}

/// Lets in who says that it is a rank of this run, or turns it away.
void Rendezvous::accept_rank(PendingConnection& one, int first) {
  Hello& hello = one.hello;
  hello.run[sizeof hello.run - 1] = 0;
  const std::string run = hello.run, own = own_hello().run;
  if (run != own) {
    const std::string text = cat("belongs to run '", own, "', not to '", run, "'");
    answer(one.socket, GreetingStatus::other_run, text.data(), text.size());
    // It tries again and again.
    if (turned_away_.emplace(hello.rank, run).second)
      log_warning("turned away rank ", hello.rank, " of another run ('", run, "', this one is '", own, "')");
    return;
  }
  const auto contradiction = [&](const std::string& reason) {
    const std::string text = cat(patience_.what, ": ", reason);
    answer(one.socket, GreetingStatus::refused, text.data(), text.size());
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
  if (!answer(one.socket, GreetingStatus::accepted)) return;
  hello.address = with_port(peer_of(one.socket), hello.port);
  hellos_[at(hello.rank)] = hello, links_[at(hello.rank)] = std::move(one.socket);
}

void Rendezvous::watch_links() {
  // Rank 0's message comes before its connection ends, or others' do because of it.
  pollfd master{told_ ? links_[0].get() : -1, POLLIN, 0};
  if (poll(&master, 1, 0) > 0) read_verdict();
  for (int r = 0; r < launch_.world_size; ++r)
    if (links_[at(r)] && ended(links_[at(r)])) end(cat("rank ", r, early));
}

void Rendezvous::gather_at_master() {
  admit(1);
  for (int r = 1; r < launch_.world_size; ++r)
    if (!answer(links_[at(r)], GreetingStatus::all_here, hellos_.data(), hellos_.size() * sizeof(Hello)))
      end(cat("rank ", r, early));
}

/// Until every rank has connected to all others. One that ends meanwhile, or tells of trouble, ends the
/// meeting for all, and is named: those who leave because of it tell rank 0 first.
void Rendezvous::read_reports() {
  // Later than the others' deadlines, who know more.
  deadline_ = Deadline::after_seconds(patience_.seconds + 3 * handshake_timeout);
  std::set<int> missing;
  for (int r = 1; r < launch_.world_size; ++r) missing.insert(r);
  while (!missing.empty()) {
    if (deadline_.passed())
      end(cat(name_ranks({missing.begin(), missing.end()}), " did not connect to all others within ",
              patience_.seconds,
              " s; see their own output, and whether the machines let each other in on all ports"));
    std::vector<pollfd> open;
    for (const int r : missing) open.push_back({links_[at(r)].get(), POLLIN, 0});
    poll(open.data(), open.size(), 100);
    std::string trouble;
    for (const int r : std::vector<int>(missing.begin(), missing.end())) {
      pollfd one{links_[at(r)].get(), POLLIN, 0};
      if (poll(&one, 1, 0) <= 0) continue;
      Answer head;
      if (!receive_all(links_[at(r)], &head, sizeof head, Deadline::after_seconds(handshake_timeout)))
        end(cat("rank ", r, early));
      if (head.status == GreetingStatus::refused && trouble.empty())
        trouble = text_after(links_[at(r)], head);
      missing.erase(r);
    }
    if (trouble.empty()) continue;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    for (const int r : missing)
      if (ended(links_[at(r)])) end(cat("rank ", r, early));  // maybe the other's trouble
    tell_all(trouble);
    throw Error(ErrorKind::comm, trouble);
  }
  for (int r = 1; r < launch_.world_size; ++r) answer(links_[at(r)], GreetingStatus::connected);
}

// ---- going to others ----

/// Rank 0's word that all have connected, or why not all could.
void Rendezvous::read_verdict() {
  Answer head;
  const Deadline last = Deadline::after_seconds(patience_.seconds + 4 * handshake_timeout);
  if (!receive_all(links_[0], &head, sizeof head, last))
    throw Error(ErrorKind::comm, cat(patience_.what, ": rank 0", early));
  if (head.status == GreetingStatus::refused) throw Error(ErrorKind::comm, text_after(links_[0], head));
}

/// Says hello; false, with the reason, when whoever listens there is not this run's rank 0.
bool Rendezvous::ask_master(FileDescriptor& socket, std::string& why) {
  const Hello mine = own_hello();
  Answer head;
  const auto soon = Deadline(
      std::min(deadline_.at() - Deadline::Clock::now(), Deadline::Clock::duration(std::chrono::seconds(10))));
  if (!send_all(socket, &mine, sizeof mine, soon) || !receive_all(socket, &head, sizeof head, soon) ||
      head.magic != magic) {
    why = "what listens there does not answer as Sherd's rank 0";
    return false;
  }
  if (head.status == GreetingStatus::refused) throw Error(ErrorKind::comm, text_after(socket, head));
  if (head.status != GreetingStatus::other_run) return true;
  why = cat("the rank 0 there ", text_after(socket, head));
  return false;
}

/// Tries until the deadline, since rank 0 may start later.
void Rendezvous::go_to_master() {
  std::string why = "it was not tried";
  do {
    for (const sockaddr_storage& each : addresses_of(launch_.master_address, launch_.master_port, 0, why)) {
      FileDescriptor socket =
          connect_to(reinterpret_cast<const sockaddr*>(&each), length_of(each), deadline_);
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

void Rendezvous::await_all() {
  // Rank 0 began before it let this rank in, so its deadline passes first: it knows who is missing, and says
  // so.
  deadline_ = Deadline::after_seconds(patience_.seconds + handshake_timeout);
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
    end(cat("rank 0", early));
  }
  if (head.status == GreetingStatus::refused) throw Error(ErrorKind::comm, text_after(links_[0], head));
  if (head.status != GreetingStatus::all_here || head.bytes != hellos_.size() * sizeof(Hello) ||
      !receive_all(links_[0], hellos_.data(), head.bytes, deadline_))
    end(cat("rank 0", early));
  told_ = true;
}

void Rendezvous::go_to_peer(int rank) {
  sockaddr_storage address = hellos_[at(rank)].address;
  // Rank 0 knows ranks of its own machine by an address that means something there only.
  if (is_loopback(address)) address = with_port(master_address_, hellos_[at(rank)].port);
  FileDescriptor socket;
  for (int turn = 0; turn < 3 && !socket && !deadline_.passed(); ++turn)
    socket = connect_to(reinterpret_cast<const sockaddr*>(&address), length_of(address), deadline_);
  if (!socket)
    end(cat("rank ", launch_.rank, " could not reach rank ", rank, " at ", text_of(address), ": ",
            system_reason(),
            "; see that rank's own output, and whether the machines let each other in on all ports"));
  const Hello mine = own_hello();
  Answer head;
  if (!send_all(socket, &mine, sizeof mine, deadline_) || !receive_all(socket, &head, sizeof head, deadline_))
    end(cat("rank ", rank, early));
  if (head.magic == magic && head.status == GreetingStatus::refused)
    throw Error(ErrorKind::comm, text_after(socket, head));
  if (head.magic != magic || head.status != GreetingStatus::accepted)
    end(cat("rank ", launch_.rank, " found something else than rank ", rank, " at ", text_of(address)));
  links_[at(rank)] = std::move(socket);
}

Meeting Rendezvous::run() {
  listen();
  if (launch_.rank == 0) {
    hellos_[0] = own_hello();
    gather_at_master();
    read_reports();
  } else {
    go_to_master();
    await_all();
    for (int r = 1; r < launch_.rank; ++r) go_to_peer(r);
    admit(launch_.rank + 1);
    answer(links_[0], GreetingStatus::connected);
    read_verdict();
  }
  Meeting out;
  out.links = std::move(links_);
  for (const Hello& hello : hellos_) out.identities.push_back(hello.identity);
  hide_unseen(out.identities, own_identity(launch_.machine));
  return out;
}

}  // namespace

Meeting rendezvous(const LaunchEnvironment& launch, const Patience& patience) {
  return Rendezvous(launch, patience).run();
}

}  // namespace sherd::comm
