//! A machine that may run machines of its own: the modules for it, and the devices for whoever is in it. Which machine
//! is one is told by its initramfs, which has a list of them.

use std::fs;
use std::os::unix::fs::PermissionsExt;

const MODULES: &str = "/modules.nested";
/// Each loads on one maker's processors, by the flag in /proc/cpuinfo.
const MAKERS: &[(&str, &str)] = &[("/kvm_amd.", "svm"), ("/kvm_intel.", "vmx")];
/// All that is in the machine is its user's: as on a desktop, no group is needed for these.
const DEVICES: &[&str] = &["/dev/kvm", "/dev/net/tun", "/dev/vhost-net"];

/// From the initramfs, before it is emptied. `load` loads the module at a path.
pub fn load(load: impl Fn(&str) -> Result<(), String>) -> Result<(), String> {
    let Ok(order) = fs::read_to_string(MODULES) else { return Ok(()) };
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let lines = order.lines().map(str::trim);
    lines.filter(|path| !path.is_empty() && fits(path, &processor)).try_for_each(load)
}

fn fits(path: &str, processor: &str) -> bool {
    let flags = processor.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    MAKERS.iter().all(|(module, flag)| !path.contains(module) || flags.split_whitespace().any(|word| word == *flag))
}

/// Those that are there: in an ordinary machine none is.
pub fn open_devices() {
    for path in DEVICES {
        let _ = fs::set_permissions(path, fs::Permissions::from_mode(0o666));
    }
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn each_makers_module_is_loaded_on_its_own_processors_alone() {
        let amd = "processor\t: 0\nflags\t\t: fpu svm sse2\nbugs\t\t: vmx\n";
        assert!(fits("/modules/kvm_amd.ko", amd) && fits("/modules/kvm.ko", amd) && fits("/modules/tun.ko", amd));
        assert!(!fits("/modules/kvm_intel.ko", amd));
        assert!(!fits("/modules/kvm_amd.ko", "flags\t: fpu svme vmx") && fits("/modules/kvm_intel.ko", "flags\t: vmx"));
        assert!(!fits("/modules/kvm_amd.ko", "") && fits("/modules/nf_tables.ko", ""));
    }
}
