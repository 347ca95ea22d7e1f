//! The documents and the scripts say what is there.

#[path = "../support/mod.rs"]
mod support;

mod deploy;
mod messages;
mod pages;
mod scripts;
mod security;
mod yaml;
