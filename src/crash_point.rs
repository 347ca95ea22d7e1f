//! The crash point macro. It is defined by this crate's own feature, so that crates that use it
//! need no such feature.

/// A point at which a `testing` build can be made to crash (see `hapax::testing::crash`); a no-op
/// in any other build.
#[cfg(feature = "testing")]
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {
        $crate::testing::crash::crash_point($name)
    };
}

/// A point at which a `testing` build can be made to crash; a no-op in this build.
#[cfg(not(feature = "testing"))]
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {};
}

/// Whether a `testing` build was asked (`HAPAX_MUTANT`) to do this step wrong, so that a test can
/// show that it would notice; always false in any other build.
#[cfg(feature = "testing")]
macro_rules! mutant {
    ($name:literal) => {
        $crate::testing::crash::is_mutant($name)
    };
}

/// Whether to do a step wrong: never in this build.
#[cfg(not(feature = "testing"))]
macro_rules! mutant {
    ($name:literal) => {
        false
    };
}

pub(crate) use mutant;
