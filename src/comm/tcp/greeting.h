#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "comm/processes/identity.h"
#include "comm/tcp/socket.h"

/// The messages of ranks while they meet (rendezvous.h), and where they listen for it.
namespace sherd::comm {

/// Who comes, and where others reach it. Plain bytes, sent as they are.
struct Hello {
  std::uint64_t magic = 0;
  std::int32_t rank = 0, world_size = 0, port = 0;
  char run[84] = {};
  RankIdentity identity;
  sockaddr_storage address{};  ///< filled in by rank 0, which sees it
};
static_assert(std::is_trivially_copyable_v<Hello>);

/// "sherd", and a number that programs have in common which understand each other.
inline constexpr std::uint64_t magic = 0x6472656873ULL << 16 | 2 << 12 | sizeof(Hello);

enum class GreetingStatus : std::uint32_t { accepted, other_run, refused, all_here, connected };

/// The answer to a Hello: accepted, then all_here or refused. After `refused` come `bytes` of text, after
/// `all_here` everybody's Hello. Ranks that have been told of all then answer rank 0 in turn, connected or
/// refused, and are told the same of all.
struct Answer {
  std::uint64_t magic = comm::magic;
  GreetingStatus status = GreetingStatus::accepted;
  std::uint32_t bytes = 0;
};

/// Strangers, and ranks that wait, are given this long to take or to say what is due.
inline constexpr double handshake_timeout = 5;

bool answer(const FileDescriptor& socket, GreetingStatus status, const void* data = nullptr,
            std::size_t bytes = 0);
/// The text that follows `head`; empty where it does not come.
std::string text_after(const FileDescriptor& socket, const Answer& head);
/// The other side has closed the connection, or is about to.
bool ended(const FileDescriptor& socket);

/// The addresses that a host has for connections to `port`. None, with the reason, where the system knows
/// none.
std::vector<sockaddr_storage> addresses_of(const std::string& host, int port, int flags, std::string& why);
/// Listens on `port`, and from this machine only where the master's address means that to everybody. Empty,
/// with errno, when it cannot.
FileDescriptor listen_for(const std::string& master, int port);

}  // namespace sherd::comm
