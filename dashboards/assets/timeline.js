// Mouse, keys, address and tooltip of the timeline. dashboards/plots/timeline.py decides what is drawn: this script
// sends it the range in view, at most one request at a time, and waits for the response.
window.overlapscope.startTimeline = (plot, minViewNs) => {
  const {root, axis, time_range: range} = plot
  const element = (id) => document.getElementById(id)
  const area = element("lanes")

  // --- view -----------------------------------------------------------------------------------------------------
  const fit = () => [plot.extent.data.from_ns[0], plot.extent.data.to_ns[0]]
  const view = window.overlapscope.rangeView({
    area,
    figures: [root],
    range,
    limits: {
      shortest: minViewNs,
      get lowest() { return fit()[0] },
      get highest() { return fit()[1] },
    },
    ask: (id, width_px) => {
      const [is_ideal, is_path] = [[element("ideal").checked], [element("path").checked]]
      const [top_px, bottom_px] = seenRows().map((each) => [each])
      const times = {from_ns: [range.start], to_ns: [range.end], width_px: [width_px]}
      plot.view.data = {id: [id], ...times, top_px, bottom_px, is_ideal, is_path}
    },
  })
  const {show, zoom, move} = view
  const strip = window.overlapscope.stepStrip(fit, (time, isFirst) => {
    const half = (range.end - range.start) / 2
    if (isFirst) jump(() => show(time - half, time + half))
    else show(time - half, time + half)
  })

  function answered() {
    const {id, step, spans, is_shaded, ideal_hint, path_hint, top_px, bottom_px} = plot.answer.data
    drawn = {top: top_px[0], bottom: bottom_px[0]}
    if (!view.answered(id[0])) return
    showRows() // they may have been scrolled on meanwhile
    showStatus(step[0], spans[0], is_shaded[0])
    element("ideal-hint").textContent = ideal_hint[0]
    element("path-hint").textContent = path_hint[0]
  }

  function showStatus(step, spans, isShaded) {
    const picker = element("step")
    if (picker && document.activeElement !== picker && step != null) picker.value = step
    const count = spans.toLocaleString("en-US")
    element("status").textContent = isShaded
      ? `${count} spans in view: shades are shares of time, red ones that of exposed communication. Zoom in for single spans.`
      : `${count} ${spans === 1 ? "span" : "spans"} in view`
    offerToSort(step)
    rememberSoon(step)
  }

  const markStrip = () => strip.mark(range.start, range.end)

  // --- ranks ----------------------------------------------------------------------------------------------------
  // All ranks are in the gutter, which scrolls; the figure stays in place and shows the heights in view. Ranks that fit
  // the window are stretched to fill it.
  const scroller = element("ranks")
  const gutter = element("gutter")
  let drawn = {top: 0, bottom: Infinity}
  const allRowsPx = () => plot.rows.data.top_px.at(-1) || 1
  const stretch = () => gutter.clientHeight / allRowsPx() || 1
  const seenRows = () => [scroller.scrollTop, scroller.scrollTop + scroller.clientHeight].map((px) => px / stretch())

  function showRows() {
    const [top, bottom] = seenRows()
    root.y_range.setv({start: bottom, end: top}, {sync: false})
    const ahead = (bottom - top) / 4
    const isMissing = (drawn.top > 0 && top - ahead < drawn.top) || (drawn.bottom < allRowsPx() && bottom + ahead > drawn.bottom)
    if (isMissing) view.schedule()
  }

  const scrollRanks = (px) => (scroller.scrollTop += px)

  // Position of the rank at a height of the figure; rows are in order.
  function positionAt(y) {
    const tops = plot.rows.data.top_px
    let [low, high] = [0, tops.length - 2]
    while (low < high) {
      const middle = Math.ceil((low + high) / 2)
      if (tops[middle] <= y) low = middle
      else high = middle - 1
    }
    return low
  }

  const yAt = ({clientY}) => seenRows()[0] + (clientY - area.getBoundingClientRect().top) / stretch()

  // Ranks that are expanded, as the address has them: all, none, or their numbers.
  function expandedText(expanded) {
    const {rank} = plot.rows.data
    if (!expanded.length) return "none"
    return expanded.length === rank.length - 1 ? "all" : expanded.join(",")
  }

  function toggleRank(toggledRank) {
    const {rank, is_expanded} = plot.rows.data
    changeRanks({expanded: expandedText(rank.filter((each, at) => each >= 0 && is_expanded[at] !== (each === toggledRank)))})
  }

  const toggleUnderPointer = () => pointer.y !== null && toggleRank(plot.rows.data.rank[positionAt(pointer.y)])

  function toggleAll() {
    changeRanks({expanded: plot.rows.data.is_expanded.some(Boolean) ? "none" : "all"})
  }

  const labelToggle = () => {
    if (element("expand-all")) element("expand-all").textContent = plot.rows.data.is_expanded.some(Boolean) ? "Collapse all" : "Expand all"
  }

  // --- zoom and pan ---------------------------------------------------------------------------------------------
  const showAll = () => jump(() => show(...fit()))

  function pickStep(step, moveBy) {
    jump(() => (plot.pick.data = {step: [step], move: [moveBy]}))
  }

  const pointer = {x: null, y: null}
  const keys = {
    w: () => zoom(0.8, pointer.x),
    s: () => zoom(1.25, pointer.x),
    a: () => move(-0.1),
    d: () => move(0.1),
    ArrowLeft: () => move(-0.1),
    ArrowRight: () => move(0.1),
    "+": () => zoom(0.8),
    "-": () => zoom(1.25),
    0: showAll,
    f: zoomToSelection,
    "/": () => element("search")?.focus(),
    "?": () => element("keys")?.showModal(),
    r: () => beginToPlace(ruler),
    t: () => plot.panel && beginToPlace(areaOfLanes),
    Escape: () => areaOfLanes.stop() || ruler.remove() || clearSelection(),
    "[": () => pickStep(Number(element("step").value), -1),
    "]": () => pickStep(Number(element("step").value), 1),
    i: () => element("ideal").click(),
    c: () => element("path").click(),
    e: ({shiftKey}) => (shiftKey ? toggleAll() : toggleUnderPointer()),
    ArrowUp: () => scrollRanks(-48),
    ArrowDown: () => scrollRanks(48),
    PageUp: () => scrollRanks(-0.9 * scroller.clientHeight),
    PageDown: () => scrollRanks(0.9 * scroller.clientHeight),
  }

  window.overlapscope.onKeys(keys)

  // The wheel zooms; with Shift it scrolls the ranks, before Bokeh sees it.
  area.addEventListener("wheel", (event) => {
    if (!event.shiftKey) return
    event.preventDefault()
    event.stopPropagation()
    scrollRanks(event.deltaY || event.deltaX)
  }, {capture: true, passive: false})

  // --- address --------------------------------------------------------------------------------------------------
  // Written when the view has come to rest. Going back undoes a jump, a zoom, a selection or an area, but not a pan.
  const NOTHING = {span: null, area: null, area_ranks: null}
  function chosenInAddress() {
    const query = new URLSearchParams(location.search)
    return Object.fromEntries(Object.keys(NOTHING).map((name) => [name, query.get(name)]))
  }
  const isInAddress = () => JSON.stringify(chosen) === JSON.stringify(chosenInAddress())
  let remembering = null
  let lastStep = null
  let chosen = chosenInAddress()
  let isJump = false
  let remembered = range.end - range.start
  const shownRange = () => ({from: Math.round(range.start), to: Math.round(range.end)})

  function jump(act) {
    isJump = true
    act()
  }

  function rememberSoon(step = lastStep) {
    lastStep = step
    clearTimeout(remembering)
    remembering = setTimeout(remember, 250)
  }

  function remember() {
    clearTimeout(remembering)
    remembering = null
    const length = range.end - range.start
    const isZoomed = Math.abs(Math.log(length / remembered)) > 0.2
    const isOther = isJump || isZoomed || !isInAddress()
    const isNew = isOther && new URLSearchParams(location.search).has("from")
    window.overlapscope.setAddress({step: lastStep, ...shownRange(), ...chosen}, {isNew})
    isJump = false
    remembered = length
  }

  window.addEventListener("popstate", () => {
    const query = new URLSearchParams(location.search)
    const [from, to] = [Number(query.get("from")), Number(query.get("to"))]
    clearTimeout(remembering) // of what is undone
    remembering = null
    isJump = false
    remembered = to - from
    if (chosenRanks() !== shownRanks) askRanks()
    if (to > from) show(from, to)
    restoreChosen()
  })

  function chosenRanks() {
    const query = new URLSearchParams(location.search)
    return ["ranks", "rank", "order", "sorted", "pin", "open", "expanded"].map((name) => query.get(name)).join(" ")
  }
  let shownRanks = chosenRanks()
  let askedRanks = 0

  // The server lays out the ranks that the address names; the view stays.
  function askRanks() {
    shownRanks = chosenRanks()
    const query = new URLSearchParams(location.search)
    if (element("order")) element("order").value = query.get("order") ?? "rank"
    if (element("chosen-ranks")) element("chosen-ranks").value = query.get("ranks") ?? ""
    ruler.remove()
    askedRanks += 1
    plot.asked_ranks.data = {id: [askedRanks], query: [location.search.slice(1)], step: [lastStep ?? 0]}
  }

  // A view that waits to be written has an entry of its own, before that of the ranks: going back undoes one at a time.
  function changeRanks(entries) {
    if (remembering !== null) remember()
    isJump = false
    window.overlapscope.setAddress({...entries, ...shownRange()}, {isNew: true})
    askRanks()
  }

  // Lateness is that of a step, which the address has so that the order stays.
  const sortRanks = (order) => changeRanks(order === "rank" ? {order: null, sorted: null} : {order, sorted: lastStep})

  // What is at the top of the window stays there, if it is still shown.
  let top = null
  const rememberTop = () => {
    const position = positionAt(seenRows()[0])
    const {rank, top_px} = plot.rows.data
    top = {rank: rank[position], offset: (seenRows()[0] - top_px[position]) * stretch()}
  }

  function ranksCame() {
    const {markup, note, sorted_step} = plot.gutter.data
    const held = gutter.contains(document.activeElement) ? document.activeElement : null
    gutter.innerHTML = markup[0]
    if (held) {
      const [name, value] = Object.entries(held.dataset)[0]
      gutter.querySelector(`.${held.className}[data-${name}="${CSS.escape(value)}"]`)?.focus({preventScroll: true})
    }
    gutter.closest(".board").classList.toggle("sorted", (element("order")?.value ?? "rank") !== "rank")
    gutter.parentElement.style.setProperty("--height", `${allRowsPx()}px`)
    if (element("ranks-note")) element("ranks-note").textContent = note[0]
    if (element("order")) element("order").dataset.step = sorted_step[0]
    const position = top ? plot.rows.data.rank.indexOf(top.rank) : -1
    if (position >= 0) scroller.scrollTop = plot.rows.data.top_px[position] * stretch() + Math.min(top.offset, 0)
    drawn = {top: 0, bottom: Infinity}
    labelToggle()
    offerToSort(lastStep)
    showRows()
    view.schedule()
  }

  function chooseRanks(input) {
    if (!input.reportValidity()) return
    input.blur()
    changeRanks({ranks: input.value.trim() || null, rank: null})
  }

  // Adds a value to a list in the address, or removes it.
  function toggled(name, value) {
    const values = new Set((new URLSearchParams(location.search).get(name) ?? "").split(",").filter(Boolean))
    if (!values.delete(value)) values.add(value)
    return {[name]: [...values].join(",") || null}
  }

  // Lateness differs from step to step.
  function offerToSort(step) {
    const order = element("order")
    if (!order || step == null) return
    element("sort-again").hidden = order.value === "rank" || step === Number(order.dataset.step)
    element("sort-again").textContent = `Sort by step ${step}`
  }

  // --- ruler ----------------------------------------------------------------------------------------------------
  const timeAt = ({clientX}) =>
    range.start + ((clientX - area.getBoundingClientRect().left) / root.inner_width) * (range.end - range.start)
  const ruler = window.overlapscope.ruler({
    area,
    plot,
    timeAt,
    rankAt: (event) => positionAt(yAt(event)),
  })

  // --- area -----------------------------------------------------------------------------------------------------
  const areaOfLanes = window.overlapscope.areaOfLanes({
    lanes: area,
    axis: element("time-axis"),
    range,
    timeAt,
    positionAt: (event) => positionAt(yAt(event)),
    rowsAt: (first, last) => [plot.rows.data.top_px[first], plot.rows.data.top_px[last + 1]].map((y) => (y - seenRows()[0]) * stretch()),
    plot,
    placing: () => ruler.isPlacing() || !plot.panel,
  })
  const isPlacing = () => ruler.isPlacing() || areaOfLanes.isPlacing()

  function beginToPlace(one) {
    areaOfLanes.stop()
    ruler.remove()
    one.begin()
  }

  function askForArea(by = 0) {
    const [from, to] = chosen.area.split("-").map((edge) => Number(edge) + by)
    areaOfLanes.ask(from, to, chosen.area_ranks ?? "")
  }

  function showArea() {
    const {from_ns, to_ns, ranks, note} = plot.area.data
    const isPlaced = areaOfLanes.takePlaced()
    if (element("search-note")) element("search-note").textContent = note[0]
    if (to_ns[0] <= from_ns[0]) return clearSelection()
    if (chosen.span !== null) choose({})
    chosen = {...NOTHING, area: `${from_ns[0]}-${to_ns[0]}`, area_ranks: ranks[0] || null}
    selection = {from: from_ns[0], to: to_ns[0], name: null}
    if (isPlaced) rememberSoon()
    else window.overlapscope.setAddress(chosen)
    tip.leave()
    showPanel()
  }

  // --- tooltips -------------------------------------------------------------------------------------------------
  let isDragging = false

  function spanAt({x, y}) {
    const {lane, row} = plot.spans.data
    const i = window.overlapscope.spanAt(plot.spans.data, {x, y}, (range.end - range.start) / (root.inner_width || 1))
    return i < 0 ? null : {lane: lane[i], row: row[i], round: roundAt({lane: lane[i], row: row[i]}, x, y)}
  }

  // The round of an all-reduce: of several at that time the one that is nearest to the pointer.
  function roundAt(span, x, y) {
    const {left, right, top, bottom, lane, row, segment} = plot.segments.data
    let [found, nearest] = [-1, Infinity]
    for (let i = 0; i < left.length; i++) {
      if (lane[i] !== span.lane || row[i] !== span.row || x < left[i] || x > right[i]) continue
      const away = Math.max(top[i] - y, y - bottom[i], 0)
      if (away < nearest) [found, nearest] = [segment[i], away]
    }
    return found
  }

  // Areas for the tooltip to avoid, preferred first: the rank pointed at and its neighbors, only that rank.
  function ranksAround(y) {
    const [{top}, seen] = [area, scroller].map((each) => each.getBoundingClientRect())
    const {top_px} = plot.rows.data
    const position = positionAt(seenRows()[0] + y / stretch())
    const heightOf = (at) => top + (top_px[Math.min(Math.max(at, 0), top_px.length - 1)] - seenRows()[0]) * stretch()
    return [1, 0].map((more) => [
      Math.max(seen.top, heightOf(position - more)),
      Math.min(seen.bottom, heightOf(position + 1 + more)),
    ])
  }

  const tip = window.overlapscope.askingTip({
    area, figure: root, request: plot.pointed, response: plot.tooltip,
    at: (event) => (isDragging || isPlacing() ? undefined : spanAt(event)),
    clear: ({sy}) => ranksAround(sy),
  })

  // --- selection ------------------------------------------------------------------------------------------------
  const LANES_OF_A_RANK = 4
  let selection = null
  let choices = 0
  const choose = ({lane = -1, row = -1, name = ""}) => {
    plot.chosen.data = {id: [(choices += 1)], lane: [lane], row: [row], name: [name]}
  }
  const samePlacePx = 5
  let tapped = null
  const panel = window.overlapscope.selectionPanel({clear: () => clearSelection(), zoomTo: () => zoomToSelection()})

  function select(event) {
    tapped = event
    const span = spanAt(event)
    if (!span) return clearSelection()
    choose({lane: span.lane, row: span.row})
  }

  // Two quick clicks are one double click to Bokeh, wherever they were.
  function selectOrShowAll(event) {
    const isElsewhere = tapped && Math.hypot(event.sx - tapped.sx, event.sy - tapped.sy) > samePlacePx
    return isElsewhere ? select(event) : showAll()
  }

  function clearSelection() {
    selection = null
    panel.hide()
    element("selection") && cover(0)
    choose({})
    if (chosen.area !== null) areaOfLanes.remove()
    const hadNone = JSON.stringify(chosen) === JSON.stringify(NOTHING)
    chosen = {...NOTHING}
    if (!hadNone) rememberSoon()
  }

  function restoreChosen() {
    if (isInAddress()) return
    const had = chosen
    chosen = chosenInAddress()
    if (had.area && !chosen.area) areaOfLanes.remove()
    if (had.span && !chosen.span) choose({})
    if (chosen.span) choose({name: chosen.span})
    else if (chosen.area) askForArea()
    else clearSelection()
  }

  function zoomToSelection() {
    if (!selection) return showAll()
    const {from, to} = selection
    const margin = Math.max((to - from) / 4, 2 * minViewNs)
    jump(() => show(from - margin, to + margin))
  }

  function selected() {
    const {lane, from_ns, to_ns, note, name, top_px, bottom_px} = plot.selection.data
    if (element("search-note")) element("search-note").textContent = note[0]
    if (!name[0] || !plot.panel) return
    const isOther = selection === null || selection.name !== name[0]
    if (chosen.area !== null) areaOfLanes.remove()
    chosen = {...NOTHING, span: name[0]}
    rememberSoon()
    selection = {from: from_ns[0], to: to_ns[0], name: name[0]}
    showPanel()
    tip.leave()
    if (isOther && lane[0] % LANES_OF_A_RANK && !plot.rows.data.is_expanded[Math.floor(lane[0] / LANES_OF_A_RANK)]) {
      toggleRank(plot.rows.data.rank[Math.floor(lane[0] / LANES_OF_A_RANK)])
    }
    const height = [top_px[0], bottom_px[0]]
    if (isOther || String(height) !== String(keptHeight)) keepInSight(...height)
    keptHeight = height
  }

  // --- following ------------------------------------------------------------------------------------------------
  // The plots have later steps. Who looks at the last one, with nothing selected, is led to the latest.
  let {origin_ns, last_end_ns} = plot.extent.data

  function followed({detail: {isAsked}}) {
    const before = {origin: origin_ns[0], end: last_end_ns[0]}
    ;({origin_ns, last_end_ns} = plot.extent.data)
    const by = before.origin - origin_ns[0]
    const isAtEnd = range.start < before.end && range.end >= before.end
    if (by) show(range.start + by, range.end + by)
    if (chosen.area) askForArea(by)
    else if (selection) choose({name: selection.name})
    else if (isAsked && last_end_ns[0]) {
      view.holdDrawing() // until what is in that step has come
      return pickStep(Number.MAX_SAFE_INTEGER, 0)
    } else if (isAtEnd) show(...[range.start, range.end].map((time) => time + last_end_ns[0] - before.end - by))
    markStrip()
    showRows()
    view.schedule()
  }

  // Its content comes before the selection or the area whose it is.
  const showPanel = () => {
    panel.show(plot.panel.data.markup[0])
    element("selection").scrollIntoView({block: "nearest"}) // in a narrow window it is below the lanes
    cover(element("selection").offsetHeight)
  }

  // The panel lies over the lowest ranks, which can be scrolled out from under it.
  let coveredPx = 0
  let keptHeight = null
  function cover(px) {
    coveredPx = px && Math.max(0, scroller.getBoundingClientRect().bottom - element("selection").getBoundingClientRect().top)
    gutter.style.setProperty("--covered", `${coveredPx}px`)
  }

  // The panel is filled before this.
  function keepInSight(top, bottom) {
    const outlinePx = 4
    const lowest = bottom * stretch() + outlinePx - (scroller.clientHeight - coveredPx)
    scroller.scrollTop = Math.min(Math.max(scroller.scrollTop, lowest), top * stretch())
  }

  function search(input) {
    if (!input.value.trim()) return
    jump(() => (plot.sought.data = {text: [input.value], from_ns: [range.start]}))
    input.blur()
  }

  // --- wiring ---------------------------------------------------------------------------------------------------
  const {on} = window.overlapscope
  on(plot.spans, "data", view.holdDrawing)
  on(plot.answer, "data", answered)
  on(plot.gutter, "data", ranksCame)
  on(plot.selection, "data", selected)
  if (plot.panel) {
    on(plot.area, "data", showArea)
    on(plot.breakdown, "data", () => (element("head").innerHTML = plot.breakdown.data.markup[0]))
  }
  on(plot.picked, "data", () => {
    show(plot.picked.data.from_ns[0], plot.picked.data.to_ns[0])
    view.schedule()
  })
  axis.on_event("doubletap", showAll)
  root.on_event("doubletap", selectOrShowAll)
  root.on_event("mousemove", ({x, y}) => Object.assign(pointer, {x, y}))
  root.on_event("tap", select)
  area.addEventListener("mouseleave", () => Object.assign(pointer, {x: null, y: null}))
  on(range, "start", tip.leave)
  for (const end of ["start", "end"]) {
    on(range, end, markStrip)
    on(range, end, () => lastStep !== null && rememberSoon())
  }
  markStrip()
  let heldY = null
  area.addEventListener("pointerdown", ({clientY}) => {
    isDragging = true
    heldY = isPlacing() ? null : clientY
  }, {capture: true})
  window.addEventListener("pointermove", ({clientY}) => {
    if (heldY === null) return
    scrollRanks(heldY - clientY)
    heldY = clientY
  }, {capture: true})
  window.addEventListener("pointerup", () => {
    isDragging = false
    heldY = null
  }, {capture: true})
  scroller.addEventListener("scroll", () => {
    showRows()
    rememberTop()
  }, {passive: true})
  new ResizeObserver(showRows).observe(scroller)
  window.addEventListener("beforeprint", () => scroller.style.setProperty("--printed-height", `${scroller.clientHeight}px`))

  element("fit")?.addEventListener("click", showAll)
  element("previous")?.addEventListener("click", () => pickStep(Number(element("step").value), -1))
  element("next")?.addEventListener("click", () => pickStep(Number(element("step").value), 1))
  element("step")?.addEventListener("change", (event) => {
    pickStep(Number(event.target.value), 0)
    event.target.blur()
  })

  element("area")?.addEventListener("click", (event) => {
    event.target.blur()
    beginToPlace(areaOfLanes)
  })
  element("selection-content")?.addEventListener("click", ({target}) => {
    const button = target.closest(".area thead button")
    if (button) window.overlapscope.sortArea(button.closest("table"), button)
  })
  element("help")?.addEventListener("click", () => element("keys").showModal())
  element("search")?.addEventListener("change", (event) => search(event.target))
  element("order")?.addEventListener("change", ({target}) => {
    target.blur()
    sortRanks(target.value)
  })
  element("sort-again")?.addEventListener("click", () => sortRanks(element("order").value))
  element("expand-all")?.addEventListener("click", toggleAll)
  gutter.addEventListener("click", ({target}) => {
    const button = target.closest("button")
    if (button?.matches(".number")) toggleRank(Number(button.dataset.rank))
    else if (button?.matches(".pin")) changeRanks(toggled("pin", button.dataset.rank))
    else if (button?.matches(".host")) changeRanks(toggled("open", button.dataset.host))
  })
  element("chosen-ranks")?.addEventListener("change", (event) => chooseRanks(event.target))
  for (const name of ["ideal", "path"]) {
    element(name).addEventListener("change", (event) => {
      window.overlapscope.setAddress({[name]: event.target.checked ? 1 : null})
      // The first response of a large recording takes seconds.
      element(`${name}-hint`).textContent = event.target.checked ? "…" : ""
      event.target.blur()
      view.schedule()
    })
  }

  if (element("order")?.value && element("order").value !== "rank") {
    window.overlapscope.setAddress({sorted: new URLSearchParams(location.search).get("sorted") ?? element("order").dataset.step})
    shownRanks = chosenRanks()
  }
  window.addEventListener("followed", followed)
  window.overlapscope.paintPlots()
  labelToggle()
  showRows()
  if (plot.selection.data.name.length) selected()
  if (plot.area.data.id.length) showArea()
  view.schedule()
}
