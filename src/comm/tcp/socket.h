#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <string>

#include "base/deadline.h"
#include "base/files.h"

namespace sherd::comm {

/// The meaning of errno.
std::string system_reason();

/// Listens on a port of all addresses, of both protocols where the system has both; 0: any port. Empty, with
/// errno, when it cannot.
FileDescriptor listen_on(int port);
/// The same on one address.
FileDescriptor listen_on(const sockaddr_storage& address);
int port_of(const FileDescriptor& listener);

/// One attempt to connect, of at most five seconds. Empty, with errno, where it fails.
FileDescriptor connect_to(const sockaddr* address, socklen_t length, const Deadline& deadline);

/// The next connection that waits to be accepted, or empty.
FileDescriptor accept_from(const FileDescriptor& listener);

/// Reads or writes all bytes; false when the other side has closed the connection or the deadline passes.
bool receive_all(const FileDescriptor& socket, void* data, std::size_t bytes, const Deadline& deadline);
bool send_all(const FileDescriptor& socket, const void* data, std::size_t bytes, const Deadline& deadline);

/// The other side's address.
sockaddr_storage peer_of(const FileDescriptor& socket);
/// An IPv4 address inside an IPv6 one as itself, which machines without IPv6 can connect to.
sockaddr_storage plain(const sockaddr_storage& address);
bool is_loopback(const sockaddr_storage& address);
sockaddr_storage with_port(sockaddr_storage address, int port);
socklen_t length_of(const sockaddr_storage& address);
/// "10.0.0.1:29500" or "[fe80::1]:29500"
std::string text_of(const sockaddr_storage& address);

}  // namespace sherd::comm
