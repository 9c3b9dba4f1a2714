#include <algorithm>

#include "comm/messages/messages.h"

namespace sherd::comm {
namespace {

enum MessagePhase : int { greeting, moving };

// Up to where the tags of collectives begin (messages.cpp).
constexpr int first_tag = 16, tags_apart = 2048, tags_of_one = 3;
static_assert(first_tag + tags_apart * tags_of_one <= 8192);

int signature_tag_of(const Call& transfer) {
  return first_tag + tags_of_one * static_cast<int>(transfer.index % tags_apart);
}
int payload_tag_of(const Call& transfer) {
  return signature_tag_of(transfer) + 1;
}
/// From the receiver to the sender.
int go_tag_of(const Call& transfer) {
  return signature_tag_of(transfer) + 2;
}

/// Calls visit(begin, bytes) for the messages that a payload travels in.
template <class Visit>
void for_each_message(const Tensor& x, const Visit& visit) {
  for (std::size_t done = 0; done < x.bytes(); done += Messages::longest_message)
    visit(x.raw() + done, std::min(Messages::longest_message, x.bytes() - done));
}

}  // namespace

void MessageTransfers::start(Call& transfer) {
  const bool sending = transfer.kind == Collective::send;
  transfer.index = (sending ? sends_ : receives_)[static_cast<std::size_t>(transfer.peer)]++;
  transfer.phase = greeting;
  transfer.envelope = std::make_shared<Envelope>(Envelope{sign(transfer)});
  auto& [call, word] = *transfer.envelope;
  if (!sending) {
    transfer.receives.push_back(port_.receive(&call, sizeof call, transfer.peer, signature_tag_of(transfer)));
    return;
  }
  transfer.sends.push_back(port_.send(&call, sizeof call, transfer.peer, signature_tag_of(transfer)));
  if (transfer.x.bytes() > 0)
    transfer.receives.push_back(port_.receive(&word, sizeof word, transfer.peer, go_tag_of(transfer)));
}

bool MessageTransfers::advance(Call& transfer) {
  const auto over = [&](int request) { return port_.test(request); };
  std::erase_if(transfer.sends, over);
  std::erase_if(transfer.receives, over);
  if (!transfer.sends.empty() || !transfer.receives.empty()) return false;
  if (transfer.phase == moving) return true;
  transfer.phase = moving;
  transfer.kind == Collective::send ? send_payload(transfer) : take_payload(transfer);
  return transfer.sends.empty() && transfer.receives.empty();
}

void MessageTransfers::send_payload(Call& transfer) {
  for_each_message(transfer.x, [&](const std::byte* begin, std::size_t bytes) {
    transfer.sends.push_back(port_.send(begin, bytes, transfer.peer, payload_tag_of(transfer)));
  });
}

void MessageTransfers::take_payload(Call& transfer) {
  board_.fail_if(transfer_mismatch(transfer, transfer.envelope->call, board_.world_rank(port_.rank())));
  for_each_message(transfer.x, [&](std::byte* begin, std::size_t bytes) {
    transfer.receives.push_back(port_.receive(begin, bytes, transfer.peer, payload_tag_of(transfer)));
  });
  if (transfer.x.bytes() > 0)
    transfer.sends.push_back(port_.send(&go_word, sizeof go_word, transfer.peer, go_tag_of(transfer)));
}

void MessageTransfers::cancel(Call& transfer) noexcept {
  bool over = true;
  for (const int request : transfer.receives) over = port_.cancel(request) && over;
  for (const int request : transfer.sends) over = port_.release(request) && over;
  transfer.receives.clear(), transfer.sends.clear();
  if (over) return;
  keep_for_good(transfer.x.storage());
  keep_for_good(transfer.envelope);
}

}  // namespace sherd::comm
