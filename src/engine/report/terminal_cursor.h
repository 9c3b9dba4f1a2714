#pragma once

#include <string>

namespace sherd::engine {

/// Hides the cursor of a terminal when it is written to it. From now on signals that nobody handles (stop
/// signals, SIGQUIT) bring it back before they end the program. One terminal at a time.
std::string hide_cursor(int terminal);
/// Brings it back when it is written; signals are as they were then.
std::string show_cursor();

/// Ends the program by `signal`, as where nobody handles it, once a hidden cursor is back. Signal handlers
/// may call it.
void end_by_signal(int signal);

}  // namespace sherd::engine
