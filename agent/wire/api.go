package wire

import "time"

// The agent's HTTP API, spoken over a stream to ServiceAPI. Bodies are JSON;
// an error is an APIError with a 4xx or 5xx status.
const (
	PathIdentity = "/v1/identity" // PUT Identity: host keys and who may log in
	PathHealth   = "/v1/health"   // GET Health
	PathPorts    = "/v1/ports"    // GET []Port; ?watch=1: a JSON line a change, the first at once
	PathStats    = "/v1/stats"    // GET Stats
	PathFiles    = "/v1/files"    // GET ?path=: file bytes or []File of a folder; PUT ?path=&mode=; DELETE
	PathClock    = "/v1/clock"    // PUT Clock: step the guest's clock
	PathShutdown = "/v1/shutdown" // POST: orderly end of the target
)

// Identity is what the SSH server of a target presents and accepts. The
// gateway sends it after every start and whenever it changes; it is kept in
// memory only.
type Identity struct {
	HostKey    Secret   `json:"host_key"`   // OpenSSH private key, PEM
	HostCert   string   `json:"host_cert"`  // authorized_keys form, signed by the host CA
	Authorized []string `json:"authorized"` // authorized_keys lines
	Hostname   string   `json:"hostname"`   // NAME.helix.local
}

// Health is the agent's own judgement of its target.
type Health struct {
	OK         bool      `json:"ok"` // every check passed
	Checks     []Check   `json:"checks"`
	Generation uint64    `json:"generation"`
	Version    string    `json:"version"`
	Booted     time.Time `json:"booted"`
	Time       time.Time `json:"time"` // the target's clock
}

// Check names.
const (
	CheckRoot      = "root"      // the root file system can be written
	CheckWorkspace = "workspace" // the workspace folder is there and can be written
	CheckSSH       = "ssh"       // the SSH server has its identity
	CheckNetwork   = "network"   // addresses and default route as planned
)

// Check is one line of Health.
type Check struct {
	Name  string `json:"name"`
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// Port is one TCP port that a program in the target listens on.
type Port struct {
	Port    uint16 `json:"port"`
	Address string `json:"address"`           // the address bound, "0.0.0.0", "::", "127.0.0.1", ...
	Process string `json:"process,omitempty"` // command name, "" when it may not be read
	PID     int    `json:"pid,omitempty"`
}

// Stats is the target's use of its machine. Sizes are in bytes.
type Stats struct {
	CPUSeconds  float64 `json:"cpu_seconds"` // busy time since boot, all CPUs
	Load1       float64 `json:"load1"`
	MemoryTotal uint64  `json:"memory_total"`
	MemoryUsed  uint64  `json:"memory_used"`
	DiskTotal   uint64  `json:"disk_total"` // of the file system that holds the workspace folder
	DiskUsed    uint64  `json:"disk_used"`
	Processes   int     `json:"processes"`
	Goroutines  int     `json:"goroutines"`  // of the agent
	Descriptors int     `json:"descriptors"` // of the agent
}

// File is one entry of a folder. Mode is the permission bits in octal.
type File struct {
	Name     string    `json:"name"`
	Size     int64     `json:"size"`
	Mode     string    `json:"mode"`
	Modified time.Time `json:"modified"`
	Folder   bool      `json:"folder,omitempty"`
}

// Clock is the gateway's time when it was sent.
type Clock struct {
	Time time.Time `json:"time"`
}

// APIError is the body of every answer that is not a success.
type APIError struct {
	Error string `json:"error"`
}
