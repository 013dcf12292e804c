//! A crate that depends on faststep from outside its workspace.
