// Package api is the gateway's HTTP API on its unix socket: the types, the
// server side (huma, with an OpenAPI document at /openapi.json) and the client
// that the command line uses.
//
// Whoever can open the socket is the owner; the file mode 0600 is the whole
// access control. Errors are RFC 9457 problem documents with two members of
// our own: "code", one of the Code constants, and "hint".
package api

import (
	"encoding/json"
	"time"
)

// Info describes the running gateway.
type Info struct {
	Version  string    `json:"version"`
	PID      int       `json:"pid"`
	State    string    `json:"state" doc:"state folder"`
	Zone     string    `json:"zone" doc:"the zone the names live in, without final dot"`
	Zones    []string  `json:"zones" doc:"every zone that is answered for"`
	Started  time.Time `json:"started"`
	Address  string    `json:"address" doc:"the gateway's own address"`
	DNS      string    `json:"dns" doc:"address and port that answer DNS, UDP and TCP"`
	SSH      string    `json:"ssh" doc:"address and port of the jump host"`
	SSHPort  uint16    `json:"ssh_port" doc:"port that leads to SSH on every workspace address"`
	HTTP     uint16    `json:"http_port" doc:"port that serves HTTP on every workspace address"`
	HTTPS    uint16    `json:"https_port" doc:"port that serves HTTPS on every workspace address"`
	Root     string    `json:"ca_certificate" doc:"file with the CA certificate that HTTPS clients trust"`
	Warnings []Warning `json:"warnings" doc:"what does not work as asked, one sentence each"`
}

// Warning is something the gateway coped with that a person may want to cure.
type Warning struct {
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

// CreateRequest asks for a new workspace. Exactly one of Image and Dir is set.
type CreateRequest struct {
	Name     string    `json:"name"`
	Image    string    `json:"image,omitempty" doc:"image of a virtual machine"`
	Dir      string    `json:"dir,omitempty" doc:"absolute path of a folder on the gateway's machine"`
	CPUs     int       `json:"cpus,omitempty" doc:"virtual CPUs, 0 for the default"`
	MemoryMB int       `json:"memory_mb,omitempty" doc:"memory of the virtual machine in MiB, 0 for the default"`
	Policy   string    `json:"policy,omitempty" doc:"what the virtual machine may reach: internet (default) or none"`
	Accel    string    `json:"accel,omitempty" doc:"auto (default), kvm or tcg"`
	Services []Service `json:"services,omitempty"`
	NoStart  bool      `json:"no_start,omitempty" doc:"leave it stopped"`
}

// Service is a port of a workspace that has a name.
type Service struct {
	Name     string `json:"name"`
	Port     uint16 `json:"port"`
	Protocol string `json:"protocol,omitempty" doc:"http (default), https, h2c, tls (passed through) or tcp"`
}

// Workspace is a workspace as the API shows it.
type Workspace struct {
	Name     string    `json:"name"`
	Hostname string    `json:"hostname"`
	Address  string    `json:"address" doc:"its address on the gateway's machine"`
	Created  time.Time `json:"created"`
	Active   string    `json:"active" doc:"name of the active target"`
	Targets  []Target  `json:"targets"`
	Services []Service `json:"services"`
	Ports    []Port    `json:"ports" doc:"what programs in the workspace listen on now"`
	URL      string    `json:"url" doc:"address of the main web service"`
	Broken   string    `json:"broken,omitempty" doc:"why the record cannot be read; nothing else is known then"`
}

// Target is one place where a workspace's work runs.
type Target struct {
	Name       string    `json:"name"`
	Kind       string    `json:"kind"`
	State      string    `json:"state"`
	Stage      string    `json:"stage,omitempty" doc:"while starting: what is being done"`
	Reason     string    `json:"reason,omitempty" doc:"why it failed or stopped"`
	Hint       string    `json:"hint,omitempty"`
	Since      time.Time `json:"since"`
	Generation uint64    `json:"generation"`
	Agent      string    `json:"agent,omitempty" doc:"agent version; empty while no agent is connected"`
	Links      []string  `json:"links,omitempty" doc:"kinds of the live links, best first"`
	Dir        string    `json:"dir,omitempty"`
	Image      string    `json:"image,omitempty"`
	CPUs       int       `json:"cpus,omitempty"`
	MemoryMB   int       `json:"memory_mb,omitempty"`
	Policy     string    `json:"policy,omitempty"`
}

// Port is a TCP port that a program in the workspace listens on.
type Port struct {
	Port    uint16 `json:"port"`
	Address string `json:"address"`
	Process string `json:"process,omitempty"`
	URL     string `json:"url" doc:"its address over HTTPS"`
}

// Event is one change, in order of Seq.
type Event struct {
	Seq       uint64    `json:"seq"`
	Time      time.Time `json:"time"`
	Kind      string    `json:"kind"`
	Workspace string    `json:"workspace,omitempty"`
	Target    string    `json:"target,omitempty"`
	State     string    `json:"state,omitempty"`
	Stage     string    `json:"stage,omitempty"`
	Message   string    `json:"message,omitempty"`
	Hint      string    `json:"hint,omitempty"`
}

// Image is a stored image.
type Image struct {
	Name    string    `json:"name"`
	Digest  string    `json:"digest"`
	Size    int64     `json:"size" doc:"bytes"`
	Created time.Time `json:"created"`
	Kernel  string    `json:"kernel,omitempty" doc:"kernel version"`
	Used    []string  `json:"used,omitempty" doc:"workspaces that use it"`
}

// BuildProgress is one line of an image build. The last one has Image or Error set.
type BuildProgress struct {
	Step    string `json:"step,omitempty"`
	Message string `json:"message,omitempty"`
	Done    int64  `json:"done,omitempty" doc:"bytes or items done"`
	Total   int64  `json:"total,omitempty" doc:"bytes or items in all, 0 when not known"`
	Image   *Image `json:"image,omitempty"`
	Error   string `json:"error,omitempty"`
	Hint    string `json:"hint,omitempty"`
	Code    Code   `json:"code,omitempty"`
}

// Key is a public key that may log in to every workspace.
type Key struct {
	Fingerprint string `json:"fingerprint"`
	Type        string `json:"type"`
	Comment     string `json:"comment,omitempty"`
}

// AddKeyRequest names the key to add, as a line of an authorized_keys file.
type AddKeyRequest struct {
	Line string `json:"line"`
}

// SSHAccess is what an SSH client on this machine needs.
type SSHAccess struct {
	Config     string `json:"config" doc:"ssh_config text"`
	ConfigFile string `json:"config_file"`
	KnownHosts string `json:"known_hosts_file"`
	KeyFile    string `json:"key_file" doc:"private key of the command line itself, mode 0600"`
}

// Plan is a launch plan as vmctl prints it.
type Plan = json.RawMessage

// Code tells a program what kind of error it got.
type Code string

// The codes.
const (
	CodeInvalid     Code = "invalid"     // the request itself is wrong
	CodeNotFound    Code = "not_found"   // no such workspace, image, key
	CodeConflict    Code = "conflict"    // name taken, image in use, wrong state for it
	CodeUnavailable Code = "unavailable" // the target cannot be reached now
	CodeInternal    Code = "internal"
)
