-- Which plane a request belongs to, and for the data plane which sandbox, port and node.
--
-- Runs in Envoy for every request, before its route is chosen. It only computes headers; every answer is
-- written by Envoy (see `proxy.replies`):
--   x-greenroom-cluster   the node's cluster: the request goes to a sandbox. A name that no cluster has
--                         (a malformed id, an unknown node) is answered as a sandbox that was not found.
--   x-greenroom-sandbox, x-greenroom-port   for the relay
--   x-greenroom-refusal   why the request is answered 400, or with x-greenroom-status
-- None of these: the request goes to the api. Prepended are DOMAIN, the domain of sandboxes' host names, and
-- CREDENTIAL, the proxy's own, with which it asks its controller whose signature a URL without a sandbox has.
--
-- Of a guest's answer only those headers are passed on that a guest may set: ours and Envoy's are not among them.

-- Requests get an x-request-id from Envoy, or keep the client's if it is a token that a log may carry;
-- anything else is replaced.

local SANDBOX_HOST = "^(%d+)%-([^.]*)%.(.+)$"
-- Bytes; the controller reads no more of a URL (MAX_TARGET in proxy/signed.py), so a longer one is nobody's.
local MAX_SIGNED = 16384

-- Ours must come from here. Envoy's own (x-envoy-retry-on and the like) would let clients steer the router, and
-- guests say what is not so.
local function forget_spoofed(headers)
  local spoofed = {}
  for name, _ in pairs(headers) do
    if name:find("^x[-_]greenroom[-_]") or name:find("^x%-envoy%-") then
      spoofed[#spoofed + 1] = name
    end
  end
  for _, name in ipairs(spoofed) do
    headers:remove(name)
  end
end

local replaced = 0

local function keep_sane_request_id(handle, headers)
  local id = headers:get("x-request-id") or ""
  if #id <= 64 and id:find("^[%w._-]+$") ~= nil then
    return
  end
  replaced = replaced + 1
  local now = handle:timestampString(EnvoyTimestampResolution.MICROSECOND)
  headers:replace("x-request-id", string.format("%s-%d", now, replaced))
end

-- The host in lower case without port and without the root's dot; nil for an address in brackets.
local function host_of(authority)
  local host = authority:match("^([^:%[%]]+)")
  if host == nil then
    return nil
  end
  return (host:lower():gsub("%.$", ""))
end

local function cluster_of(id)
  local code = id:match("^i([a-z0-9][a-z0-9][a-z0-9][a-z0-9])[a-z0-9]+$")
  if code == nil or #id ~= 20 then
    return "none"
  end
  return "node_" .. code
end

local function is_port(text)
  return #text <= 5 and text:find("^[1-9]%d*$") ~= nil and tonumber(text) <= 65535
end

local function refuse(headers, message, status)
  headers:replace("x-greenroom-refusal", message)
  if status ~= nil then
    headers:replace("x-greenroom-status", status)
  end
end

local function send_to_sandbox(handle, headers, id, port)
  headers:replace("x-greenroom-sandbox", id:sub(1, 64))
  headers:replace("x-greenroom-port", port)
  headers:replace("x-greenroom-cluster", cluster_of(id))
  handle:streamInfo():dynamicMetadata():set("greenroom", "to_sandbox", true)
end

local function is_signed(path)
  return path:find("^/files%?") ~= nil and path:find("[?&]signature=") ~= nil
end

-- The sandbox of a signed URL that names none: see proxy/signed.py.
local function find_signed(handle, path)
  local address = handle:streamInfo():downstreamDirectRemoteAddress()
  local answer = handle:httpCall("controller", {
    [":method"] = "POST",
    [":path"] = "/v1/signed",
    [":authority"] = "controller",
    ["authorization"] = "Bearer " .. CREDENTIAL,
    ["x-greenroom-method"] = handle:headers():get(":method"),
    ["x-greenroom-from"] = address:match("^%[(.*)%]:%d+$") or address:match("^(.*):%d+$") or address,
  }, path, 3000)
  local headers = handle:headers()
  local status = answer[":status"]
  if status == "200" then
    send_to_sandbox(handle, headers, answer["x-greenroom-sandbox"], "49983")
  elseif status == "404" then
    refuse(headers, "invalid signature", "401")
  elseif status == "429" then
    refuse(headers, "too many signatures that are not valid; try again later", "429")
  else
    refuse(headers, "whose this signature is cannot be told now; try again", "503")
  end
end

function envoy_on_request(handle)
  local headers = handle:headers()
  forget_spoofed(headers)
  keep_sane_request_id(handle, headers)
  local port, id, domain
  local host = host_of(headers:get(":authority") or "")
  if host ~= nil then
    port, id, domain = host:match(SANDBOX_HOST)
  end
  if domain ~= DOMAIN then
    id, port = headers:get("e2b-sandbox-id"), headers:get("e2b-sandbox-port")
    if id == nil and port == nil then
      -- Envoy passes on what follows an upgrade request unread, so the api would get requests from us that
      -- kept their x-greenroom headers. It offers no upgrade anyway.
      local path = headers:get(":path") or ""
      if headers:get("upgrade") ~= nil then
        refuse(headers, "the api offers no upgrade")
      elseif is_signed(path) and #path > MAX_SIGNED then
        refuse(headers, "a signed URL has at most " .. MAX_SIGNED .. " bytes")
      elseif is_signed(path) then
        find_signed(handle, path)
      end
      return
    end
    if id == nil or port == nil then
      refuse(headers, "E2b-Sandbox-Id and E2b-Sandbox-Port belong together; one is missing")
      return
    end
    if headers:getNumValues("e2b-sandbox-id") ~= 1 or headers:getNumValues("e2b-sandbox-port") ~= 1 then
      refuse(headers, "E2b-Sandbox-Id and E2b-Sandbox-Port are sent once")
      return
    end
  end
  if not is_port(port) then
    refuse(headers, "the sandbox port must be a number from 1 to 65535")
    return
  end
  send_to_sandbox(handle, headers, id, port)
end

function envoy_on_response(handle)
  if handle:streamInfo():dynamicMetadata():get("greenroom") ~= nil then
    forget_spoofed(handle:headers())
  end
end
