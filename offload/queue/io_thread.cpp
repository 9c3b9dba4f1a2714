#include "offload/queue/io_thread.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <thread>

namespace sherd::offload {
namespace {

using namespace std::chrono_literals;

/// How often a request may move nothing in a row; from the third time on after a pause.
constexpr int most_retries = 200;

std::string next_step(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return ". Free space there, or choose a larger disk with nvme_path, and resume from the last "
             "checkpoint";
    case EIO:
      return ". Check the disk (the kernel's log says more), and resume from the last checkpoint";
    default:
      return ". Resume from the last checkpoint";
  }
}

}  // namespace

IoThread::IoThread(TransferQueue& queue)
    : queue_(queue),
      cutting_{queue.options.block_size, bounce_slot_bytes(queue.options)},
      slots_(static_cast<std::size_t>(queue.options.queue_depth)),
      completions_(slots_.size()) {
  for (std::size_t i = slots_.size(); i-- > 0;) free_slots_.push_back(i);
  for (int i = bounce_slots(queue.options); i-- > 0;) free_bounces_.push_back(i);
}

void IoThread::run() {
  while (!queue_.stopping() || under_way_ > 0) {
    try {
      turn();
    } catch (const std::exception& error) {
      // Requests may be with the kernel still: their memory stays with the slots.
      queue_.fail(ErrorKind::io,
                  cat("transfers of '", queue_.file.path().string(), "' (rank ", queue_.options.rank,
                      ") cannot go on: ", error.what()),
                  true);
      std::this_thread::sleep_for(10ms);
    }
  }
}

void IoThread::turn() {
  fill();
  hand_over();
  const std::size_t count = queue_.backend->reap(completions_, 10s);
  for (std::size_t i = 0; i < count; ++i) complete(completions_[i]);
  hand_over();  // requests that go on, before anything new is cut and copied
}

void IoThread::hand_over() {
  if (outgoing_.empty()) return;
  std::vector<IoRequest> requests;
  requests.swap(outgoing_);
  queue_.backend->submit(requests);
}

void IoThread::fill() {
  if (!queue_.options.overlap_events && under_way_ > 0) return;
  while (!free_slots_.empty()) {
    if (current_ && (current_->done || current_->cut == current_->bytes)) current_.reset();
    if (!current_) current_ = queue_.take_ready();
    if (!current_) return;
    const TransferPiece piece = next_piece(*current_, cutting_);
    if (!piece.direct && free_bounces_.empty()) return;
    begin(piece);
  }
}

void IoThread::begin(const TransferPiece& piece) {
  const std::size_t index = free_slots_.back();
  free_slots_.pop_back();
  RequestSlot& slot = slots_[index];
  slot = RequestSlot{};
  slot.transfer = current_;
  slot.piece = piece;
  slot.pages = piece.memory;
  if (!piece.direct) {
    queue_.bytes_bounced += piece.bytes;
    slot.bounce = free_bounces_.back();
    free_bounces_.pop_back();
    slot.pages = queue_.bounce.data() + static_cast<std::size_t>(slot.bounce) * cutting_.bounce_bytes;
  }
  current_->cut += piece.bytes;
  ++current_->under_way;
  ++under_way_;
  if (!current_->write) return request(index, false);
  slot.fetching = piece.merge;
  if (piece.merge) return request(index, false);
  load_and_write(index);
}

void IoThread::request(std::size_t index, bool write) {
  RequestSlot& slot = slots_[index];
  slot.retries = 0;
  slot.rest = {.write = write,
               .offset = slot.piece.file_begin,
               .memory = slot.pages,
               .bytes = static_cast<std::uint32_t>(slot.piece.file_bytes),
               .registered = slot.bounce >= 0 ? queue_.bounce_handle : slot.transfer->registered,
               .tag = index};
  outgoing_.push_back(slot.rest);
}

void IoThread::load_and_write(std::size_t index) {
  RequestSlot& slot = slots_[index];
  const TransferPiece& piece = slot.piece;
  if (!piece.direct) {
    const bool copied = queue_.copy_unless_done(*slot.transfer, [&] {
      std::memcpy(slot.pages + piece.skip, piece.memory, piece.bytes);
      if (!piece.merge) std::memset(slot.pages + piece.bytes, 0, piece.file_bytes - piece.bytes);
    });
    if (!copied) return release(index);
  }
  Extent& extent = *slot.transfer->extent;
  note_pages(extent, piece.file_begin - extent.begin, slot.pages, piece.file_bytes);
  request(index, true);
}

void IoThread::complete(const IoCompletion& completion) {
  const std::size_t index = completion.tag;
  RequestSlot& slot = slots_[index];
  if (slot.transfer->done) return release(index);
  const std::int64_t result = completion.result;
  if (result == -EINTR || result == -EAGAIN) {
    if (!again(index))
      fail_request(index, ErrorKind::io, slot.rest.offset, std::strerror(static_cast<int>(-result)));
  } else if (result < 0) {
    const int error = static_cast<int>(-result);
    fail_request(index, ErrorKind::io, slot.rest.offset, std::strerror(error) + next_step(error));
  } else if (result == 0) {
    fail_request(index, ErrorKind::io, slot.rest.offset,
                 (slot.rest.write ? "the device takes no bytes" : "the file ends there") + next_step(0));
  } else if (go_on(index, result)) {
    if (slot.fetching || !slot.rest.write)
      arrived(index);
    else {
      queue_.bytes_written += slot.piece.bytes;
      release(index);
    }
  }
}

/// True when the whole request is done; otherwise the rest is on its way.
bool IoThread::go_on(std::size_t index, std::int64_t moved) {
  RequestSlot& slot = slots_[index];
  if (static_cast<std::uint64_t>(moved) >= slot.rest.bytes) return true;
  // Direct I/O goes on at a page only.
  const std::uint32_t whole = static_cast<std::uint32_t>(moved) / page * page;
  slot.rest.offset += whole;
  slot.rest.memory += whole;
  slot.rest.bytes -= whole;
  if (whole > 0) slot.retries = 0;
  if (!again(index))
    fail_request(index, ErrorKind::io, slot.rest.offset, "the device moves parts of a page only");
  return false;
}

/// Puts the rest of a request on its way once more, unless that has led nowhere for long.
bool IoThread::again(std::size_t index) {
  RequestSlot& slot = slots_[index];
  if (++slot.retries > most_retries) return false;
  if (slot.retries > 2) std::this_thread::sleep_for(1ms);
  outgoing_.push_back(slot.rest);
  return true;
}

/// The pages of a read are there.
void IoThread::arrived(std::size_t index) {
  RequestSlot& slot = slots_[index];
  const TransferPiece& piece = slot.piece;
  Transfer& transfer = *slot.transfer;
  const Extent& extent = *transfer.extent;
  if (const auto bad = find_bad_page(extent, piece.file_begin - extent.begin, slot.pages, piece.file_bytes))
    return fail_request(
        index, ErrorKind::data, extent.begin + *bad,
        "the page is not what was written (its CRC-32C differs): the disk lost or tore a write. Check "
        "the disk, and resume from the last checkpoint");
  if (std::exchange(slot.fetching, false)) return load_and_write(index);
  if (!piece.direct)
    queue_.copy_unless_done(transfer,
                            [&] { std::memcpy(piece.memory, slot.pages + piece.skip, piece.bytes); });
  queue_.bytes_read += piece.bytes;
  release(index);
}

void IoThread::fail_request(std::size_t index, ErrorKind kind, std::uint64_t file_offset,
                            const std::string& cause) {
  const Transfer& transfer = *slots_[index].transfer;
  const std::string damage = queue_.file.damage();  // explains more, where there is any
  queue_.fail(kind,
              cat("cannot ", transfer.write ? "write" : "read", " '", transfer.extent->name, "' at offset ",
                  file_offset - transfer.extent->begin, " (rank ", queue_.options.rank, ", '",
                  queue_.file.path().string(), "'): ", damage.empty() ? cause : "the file " + damage));
  release(index);
}

void IoThread::release(std::size_t index) {
  RequestSlot& slot = slots_[index];
  const std::shared_ptr<Transfer> transfer = std::move(slot.transfer);
  if (slot.bounce >= 0) free_bounces_.push_back(slot.bounce);
  free_slots_.push_back(index);
  --under_way_;
  if (--transfer->under_way > 0 || (transfer->cut < transfer->bytes && !transfer->done)) return;
  transfer->lease.reset();  // a buffer is free before anybody is told
  if (!transfer->done) queue_.finish(transfer);
}

}  // namespace sherd::offload
