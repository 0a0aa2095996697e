//! `lockstream dashboard`: a page that shows the locks of a store live.
//!
//! | file | question it answers |
//! |---|---|
//! | `serve.rs` | how do pages get what was seen? |
//! | `board.rs` | what was seen, and what has changed since? |
//! | `admission.rs` | which requests are answered? |
//! | `demo.rs` | what is shown without a store? |
//! | `page.html` | the page itself |
//!
//! `events()` tells a registry of its own locks. This looks into the store instead, by `scan`, and so sees those of all
//! registries. It takes no lock and writes nothing. On Redis it needs the right to `scan`, in PostgreSQL that to `scan_1`.
//!
//! One task looks while a page is open, however many pages there are, and they are sent what it saw as server-sent events.
//! After a look that took long it pauses for longer: a large database has other things to do. What comes and goes between two looks is not seen: this is for people, and counts nothing exactly.

mod admission;
mod board;
mod demo;
mod serve;

pub(crate) use serve::dashboard;
