//! The macro of crash points. It is defined by this crate's own feature, so that whoever uses it need not have one.

/// A step at which a `testing` build can be made to die (see `hapax::testing::crash`); nothing in any other build.
#[cfg(feature = "testing")]
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {
        $crate::testing::crash::crash_point($name)
    };
}

/// A step at which a `testing` build can be made to die; nothing in this build.
#[cfg(not(feature = "testing"))]
#[macro_export]
macro_rules! crash_point {
    ($name:literal) => {};
}

/// Whether a `testing` build was told (`HAPAX_MUTANT`) to do this step wrong, so that a test can show that it would notice;
/// never in any other build.
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
